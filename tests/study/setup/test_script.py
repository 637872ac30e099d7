"""What is concluded of two runs of a script."""

from dataclasses import replace

import pytest
from support.paths import SCRIPTS

from autotune.space.candidate import Candidate
from autotune.study.setup import remedies, sums
from autotune.study.setup.script import _left_open, _untouched, _untouched_config, script_request
from autotune.study.spec.spec import StudySpec
from autotune.trial.result import Observed, Outcome, TrialResult
from autotune.trial.workload import Probed


def ran(steps, losses):
    seen = Observed(
        micro_batch_size=4, loader_batch_size=4, gradient_accumulation_steps=steps, samples_per_step=4 * steps,
        tokens_per_step=None, zero_stage=0, dtype="fp32",
    )  # fmt: skip
    return TrialResult(outcome=Outcome.COMPLETE, observed=seen, losses=losses)


SEEN = ran(4, []).observed


@pytest.mark.parametrize(
    ("before", "moved", "growth"),
    [
        ([3.0, 2.9, 2.8, 2.7], [6.0, 5.7], 1),
        ([3.0, 2.9, 2.8, 2.7], [3.0, 2.9], 0),
        ([3.63, 5.55, 4.10, 5.15], [6.43, 6.40], 0),  # other weights and samples in each run
        ([3.0, 2.9, 2.8, 2.7], [1.5, 1.4], -1),
        ([3.0, 2.9, 2.8, 2.7], [1.5, 5.8], 0),
        ([], [6.0], None),
        ([None, 2.9], [6.0, 5.8], None),  # which cannot tell
    ],
)
def test_a_loss_grows_or_falls_with_the_accumulation_only_where_each_step_says_so(before, moved, growth):
    assert sums.growth(ran(4, before), ran(8, moved)) == growth


@pytest.mark.parametrize(
    ("own", "other", "steps", "paced"),
    [
        ((0.0, 0.1), (0.0, 0.2), 8, "number"),  # warms up with each micro-batch
        ((0.1, 0.2), (0.05, 0.1), 2, "number"),
        ((0.0, 0.1), (0.0, 0.05), 8, "loader"),  # in steps, for a length of batches of the loader
        ((0.1, 0.2), (0.2, 0.4), 2, "loader"),
        ((6.4, 6.3), (3.2, 3.15), 8, "size"),  # set by the micro-batch, and lowered
        ((6.4, 6.4), (12.8, 12.8), 2, "size"),
        ((0.0, 0.1), (0.0, 0.1), 8, ""),
        ((1.0, 1.0 - 1e-9), (1.0, 1.0 - 1.01e-9), 8, ""),  # to a total of steps that was rounded
        ((0.1, 0.1), (0.1, 0.1), 8, ""),
        ((0.0, 0.1), (), 8, ""),
        ((0.0, 0.1), (0.0, 0.2), 4, ""),
    ],
)
def test_a_rate_that_follows_the_micro_batches_is_told_by_two_runs_of_one_global_batch(own, other, steps, paced):
    """Another accumulation was called drop-in, although its warm-up took another number of samples.

    A schedule that moves with each step, but is as long as the loader, was said to move with each micro-batch, and to
    need the inverse factor; so was a rate that the script sets by the micro-batch.
    """
    first, moved = (
        replace(ran(n, []).observed, samples_per_step=16, rates=rates) for n, rates in ((4, own), (steps, other))
    )
    results = [replace(ran(4, []), observed=seen) for seen in (first, moved)]
    probed = Probed(ds_config={}, micro_batch_size=4, gradient_accumulation_steps=4)
    probed, notes = sums.with_findings(probed, None, *results)
    note, change = {
        "": ([], ""),
        "number": ([sums.PACED], "multiply its lengths (warm-up, total) by 2"),
        "loader": ([sums.LENGTHENED], "multiply them (warm-up, total) by 0.5"),
        "size": ([sums.SIZED], "set it as for 4 samples"),
    }[paced]
    assert probed.paced == paced and notes == note and sums.changes(probed, 1) == []
    assert change in " ".join(sums.changes(probed, 2)) and bool(sums.changes(probed, 2)) == bool(paced)


def test_a_schedule_follows_the_micro_batches_of_a_loop_that_a_trial_leaves_as_it_is():
    """A loop that counts by a variable of the code was told to set that, and to change its schedule as well."""
    moved = f"{sums.IN_CODE} `accum`: set that to 8 instead of 4."
    results = [
        replace(
            ran(n, []), observed=replace(ran(n, []).observed, samples_per_step=16, rates=rates), side_changes=[moved]
        )
        for n, rates in ((4, (0.0, 0.1)), (8, (0.0, 0.2)))
    ]
    probed = Probed(ds_config={}, micro_batch_size=4, gradient_accumulation_steps=4, moved_by=(moved,))
    probed, notes = sums.with_findings(probed, None, *results)
    assert notes == [sums.PACED + sums.COUNTED] and f"by 2{sums.COUNTED}." in sums.changes(probed, 2)[0]


@pytest.mark.parametrize(
    ("own", "other", "paced"),
    [
        ((4, 4), (8, 8), True),
        ((1, 1), (1, 1), False),
        ((0, 0), (0, 0), False),
        ((12, 15), (24, 30), True),
        ((), (), False),
    ],
)
def test_another_model_that_is_stepped_with_each_micro_batch_is_told_by_two_runs(own, other, paced):
    """Another split of the batch was called drop-in where a critic took twice the steps, of half the batch."""
    results = [
        replace(ran(n, []), observed=replace(ran(n, []).observed, samples_per_step=16, beside=beside))
        for n, beside in ((4, own), (8, other))
    ]
    probed = Probed(ds_config={}, micro_batch_size=4, gradient_accumulation_steps=4)
    probed, notes = sums.with_findings(probed, None, *results)
    assert probed.paced_beside == bool(notes) == paced
    assert (
        "Other optimizer: it steps with each micro-batch, 2 times as often" in str(sums.changes(probed, 2))
    ) == paced


@pytest.mark.parametrize("name", ["micro_batch_size", "gradient_accumulation_steps"])
def test_a_script_that_ignores_a_template_is_not_said_to_lack_one(name):
    """A model of sequences first, without a DataLoader, shows as many rows at each batch."""
    probed = Probed(ds_config={}, micro_batch_size=8, gradient_accumulation_steps=2)
    plain, templated = (
        StudySpec.of(SCRIPTS / "dict_config.py", {"ranks": 1, "script_args": words})
        for words in ([], ["--n", f"{{{name}}}"])
    )
    assert f"--flag {{{name}}}" in remedies.unmoved(plain, probed, name, SEEN)
    assert remedies.unmoved(templated, probed, name, SEEN).startswith(f"the script was given another `{{{name}}}`")
    assert "--flag" not in remedies.unmoved(templated, probed, name, SEEN)


def test_the_constants_that_may_carry_what_does_not_move_are_named(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import deepspeed\nengine, *_ = deepspeed.initialize()\n"
        "lr, seed = 4, 4\nn = 5; verbose = True; batch_size = 4\naccum: int = 4\nsteps = 2 * 2\n"
    )
    spec, probed = (
        StudySpec.of(script, {"ranks": 1}),
        Probed(ds_config={}, micro_batch_size=4, gradient_accumulation_steps=1),
    )
    said = remedies.unmoved(spec, probed, "micro_batch_size", SEEN)
    assert said.endswith("Of the script's constants `batch_size` and `accum` have the value 4")
    assert "constants" not in remedies.unmoved(spec, probed, "gradient_accumulation_steps", SEEN)


@pytest.mark.parametrize(
    ("text", "family", "said"),
    [
        (
            '{"model": {"batch_size": 4}}',
            "raw DeepSpeed",
            "take it from the engine (`engine.train_micro_batch_size_per_gpu()`) or a",
        ),
        ('{"model": {"batch_size": 4}}', "Lightning", "have the script take it from a flag that wins over the file"),
        (
            '{"model": {"batch_size": 40}}',
            "raw DeepSpeed",
            "no flag, constant or DataLoader moves it. To tune it, pass it by a flag",
        ),
    ],
)
def test_a_batch_in_a_file_of_the_scripts_is_told_from_one_that_a_constant_may_carry(text, family, said, tmp_path):
    """The remedies that were told (a flag, --set, a variable) cannot reach a value in a JSON file."""
    for name in ("run.json", "ds.json"):
        (tmp_path / name).write_text(text)
    words = ["--config=run.json", "--ds", "ds.json", "absent.yaml"]
    spec = StudySpec.of(SCRIPTS / "dict_config.py", {"ranks": 1, "script_args": words, "working_dir": tmp_path})
    probed = Probed(
        ds_config={}, micro_batch_size=4, gradient_accumulation_steps=1, family=family, config_source="ds.json"
    )
    found = remedies.unmoved(spec, probed, "micro_batch_size", SEEN)
    assert said in found and ("trials leave run.json as it is" in found) is ("40" not in text)
    assert "--flag {micro_batch_size}" in found


@pytest.mark.parametrize(
    ("words", "outcome", "helped"),
    [
        ([], Outcome.CRASHED, True),  # which may count its micro-batches by what was not moved
        (["--accumulate", "{gradient_accumulation_steps}"], Outcome.CRASHED, False),
        ([], Outcome.TOO_FEW_STEPS, False),
    ],
)
def test_a_script_that_crashes_with_another_accumulation_is_told_how_to_pass_it(words, outcome, helped):
    """One whose own count has to be the configuration's was told that its accumulation stays, and not what to do."""
    spec = StudySpec.of(SCRIPTS / "dict_config.py", {"ranks": 1, "script_args": words})
    result = TrialResult(outcome=outcome, reason="AssertionError: 8 == 4")
    said = remedies.ended(spec, result, "gradient_accumulation_steps", 8, 4)
    assert "with accumulation 8 the script ended" in said and "so it stays 4" in said
    assert ("`--flag {gradient_accumulation_steps}`" in said) == helped


@pytest.mark.parametrize(
    ("config", "batch"),
    [
        ({"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 2}}, (16, 1)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, (16, 2)),
        ({"train_batch_size": 32}, (16, 1)),
        ({"gradient_accumulation_steps": 4}, (8, 4)),
        ({"train_micro_batch_size_per_gpu": "auto"}, (8, 1)),
    ],
)
def test_templates_are_first_filled_with_what_the_users_configuration_states(config, batch):
    """They were filled with a micro-batch of 8, which DeepSpeed refused beside another batch, or which became the baseline."""
    words = ["--n", "{micro_batch_size}", "--stage={zero_stage}", "--config", "{ds_config}"]
    spec = StudySpec.of(SCRIPTS / "dict_config.py", {"ranks": 2, "script_args": words, "base_config": config})
    own, written = _untouched(spec, world_size=2), _untouched_config(spec)
    assert (own.micro_batch_size, own.gradient_accumulation_steps) == batch
    stage = config.get("zero_optimization", {}).get("stage", 0)
    assert script_request(spec, None, own, own).arguments[1:3] == (str(batch[0]), f"--stage={stage}")
    assert written.items() >= config.items() and bool(_left_open(spec, own)) is not spec.batch_is_configured
    assert not spec.batch_is_configured or written == config


@pytest.mark.parametrize(
    ("stays", "n", "constants"), [({}, "35", {"BATCH": "35"}), ({"micro_batch_size": 16}, "16", {})]
)
def test_a_template_that_moves_nothing_is_filled_as_in_the_untouched_script(stays, n, constants):
    """A model of sequences first was trained with its sequences' length as its batch."""
    probed = Probed(ds_config={}, micro_batch_size=35, gradient_accumulation_steps=1, stays=stays)
    words = ["--n", "{micro_batch_size}"]
    given = {"ranks": 1, "script_args": words, "script_set": ["BATCH={micro_batch_size}"]}
    own = Candidate(micro_batch_size=35)
    request = script_request(StudySpec.of(SCRIPTS / "hand_made.py", given), probed, own, own)
    assert request.arguments == ("--n", n) and request.assignments == constants
