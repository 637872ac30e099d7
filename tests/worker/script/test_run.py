"""Training scripts in real ranks: what is found, what moves, what is refused."""

import itertools
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.bench import losses_without_hooks
from support.diagnosed import of_result
from support.paths import SCRIPTS

from autotune.errors import UserError
from autotune.scoring.metrics import METRICS
from autotune.space.legality import why_illegal
from autotune.study.setup import plan
from autotune.study.spec.spec import StudySpec
from autotune.trial.command import Invocation
from autotune.trial.folder import events
from autotune.trial.request import TailCheck
from autotune.trial.result import WRITES_FILES, Observed, Outcome
from autotune.worker.script.probe import _how_counted

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("home")]

SPLIT_SEQUENCES = """
import deepspeed, torch
from deepspeed.runtime.sequence_parallel import parallel_state_sp as groups
deepspeed.init_distributed()
groups.initialize_sequence_parallel(2)
first = 8 * torch.distributed.get_rank()
model = torch.nn.Sequential(torch.nn.Embedding(64, 8), torch.nn.Linear(8, 64))
config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
engine, *_ = deepspeed.initialize(model=model, config=config, mpu=groups)
data = torch.randint(64, (400, 16), generator=torch.Generator().manual_seed(0))
for words in torch.utils.data.DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu()):
    own = words[:, first : first + 8]
    engine.backward(torch.nn.functional.cross_entropy(engine(own).flatten(0, 1), own.flatten()))
    engine.step()
"""


def facts(found):
    baseline = found.baseline
    return baseline.micro_batch_size, baseline.gradient_accumulation_steps, set(found.workload.script.movable)


MICRO, ACCUM = {"micro_batch_size"}, {"gradient_accumulation_steps"}
BOTH = MICRO | ACCUM


@pytest.mark.cells(7)
@pytest.mark.parametrize(
    ("name", "arguments", "overrides", "expected"),
    [
        ("dict_config.py", ("--batch_size", "4"), {}, (4, 1, BOTH)),
        ("training_data.py", (), {}, (8, 2, BOTH)),
        ("own_loader.py", (), {}, (8, 2, BOTH)),
        ("sequence_first.py", (), {}, (8, 2, BOTH)),
        ("hand_made.py", (), {}, (8, 2, ACCUM)),
        ("hand_made.py", (), {"script_set": ["BATCH={micro_batch_size}"]}, (8, 2, BOTH)),
        ("chunks.py", (), {}, (8, 4, MICRO)),
        ("from_engine.py", (), {}, (8, 2, BOTH)),
        ("dict_config.py", ("--batch_size", "{micro_batch_size}"), {}, (8, 1, BOTH)),
        *(("parts.py", ("--parts", str(n)), {}, (24 // n, 1, BOTH)) for n in (3, 2, 8)),
        ("parts.py", ("--style", "follow", "--accumulate", "4"), {}, (6, 4, BOTH)),
        ("parts.py", ("--style", "split"), {}, (8, 1, ACCUM)),
        ("parts.py", ("--style", "split"), {"script_set": ["PART={micro_batch_size}"]}, (8, 1, BOTH)),
        ("parts.py", ("--style", "hand-made"), {}, (6, 1, ACCUM)),
        ("parts.py", ("--style", "hand-made"), {"script_set": ["BIG={micro_batch_size}*4"]}, (6, 1, BOTH)),
        ("parts.py", ("--style", "pairs", "--parts", "1"), {}, (48, 1, ACCUM)),
        ("parts.py", ("--samples", "100"), {}, (6, 1, BOTH)),
        ("own_flags.py", (), {}, (8, 2, ACCUM)),
        ("own_flags.py", ("--rows", "{micro_batch_size}"), {}, (8, 2, BOTH)),
        ("own_flags.py", ("--rows", "6"), {"arg_mappings": {"train_micro_batch_size_per_gpu": "--rows"}}, (6, 2, BOTH)),
        ("own_flags.py", ("--mapped", "1"), {}, (8, 2, BOTH)),
        ("own_flags.py", ("--train.batch-size", "6"), {}, (6, 2, BOTH)),
        ("own_flags.py", ("--train.batch-size", "6", "--train.accum", "4"), {}, (6, 4, BOTH)),
    ],
)
def test_a_probe_finds_the_batch_and_what_of_it_moves(bench, name, arguments, overrides, expected):
    assert facts(bench.plan(name, *arguments, **overrides)) == expected


CONFIG = {
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}, "zero_optimization": {"stage": 1},
}  # fmt: skip


@pytest.mark.system
def test_a_script_that_is_given_the_trials_json_and_other_fields_runs_what_was_asked_for(bench):
    arguments = ("--conf", "{ds_config}", "--rows", "{train_micro_batch_size_per_gpu}", "--zero", "{zero_stage}")
    found = bench.plan("own_flags.py", *arguments, base_config=CONFIG, ranks=2)
    assert facts(found) == (4, 3, BOTH) and found.baseline.zero_stage == 1  # as the configuration states
    assert not [note for note in found.notes if "leaves the batch to autotune" in note]
    result = bench.applied(found, zero_stage=2, micro_batch_size=3, gradient_accumulation_steps=2)
    given = f"'--conf': '{bench.folder.ds_config}', '--rows': '3', '--zero': '2'"
    assert given in bench.folder.log(1).read_text()
    assert {text.partition(" in it")[0] for text in result.side_changes} == {
        "Command line: `{micro_batch_size}`", "Command line: `{zero_stage}`",
    }  # fmt: skip


@pytest.mark.system
def test_a_probe_tells_whether_each_device_has_the_whole_model_before_stage_3_shards_it(bench, tmp_path):
    """Below stage 3 every script was taken to make its model in shards."""
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG | {"zero_optimization": {"stage": 3}}))
    whole = bench.plan("own_flags.py", "--conf", str(tmp_path / "ds.json"), "--rows", "4")
    in_shards, below = bench.plan("from_engine.py"), bench.plan("own_flags.py", "--rows", "4")
    assert [found.workload.profile.built_bytes for found in (whole, in_shards, below)] == [0, None, 0]
    # What ZeRO 3 does around each module is no part of the model: a baseline of it had four times the operations.
    ours, plain = (found.workload.profile.passes["fp32/0"] for found in (whole, below))
    assert ours.n_ops == pytest.approx(plain.n_ops, rel=0.05)
    assert (ours.flops, ours.kept_bytes) == (plain.flops, plain.kept_bytes)
    assert ours.moved_bytes[1] == pytest.approx(plain.moved_bytes[1], rel=0.01)


def test_how_often_the_users_configuration_prints_stays_in_it(bench, tmp_path):
    """The exported JSON, called complete, had lost it."""
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG | {"steps_per_print": 7}))
    found = bench.plan("own_flags.py", "--conf", str(tmp_path / "ds.json"), "--rows", "4")
    assert found.base_config["steps_per_print"] == 7


def test_a_module_gets_its_package_and_the_variables_of_its_launcher(bench, tmp_path):
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "net.py").write_text((SCRIPTS / "common.py").read_text())
    (package / "loop.py").write_text((SCRIPTS / "own_flags.py").read_text().replace("from common", "from .net"))
    (package / "train.py").write_text("from . import loop\n")  # not recognisable as a training script
    how = Invocation(
        script=str(package / "train.py"), module="pkg.train", working_dir=str(tmp_path),
        environment={"ROWS": "{micro_batch_size}"}, arguments=("--local_rank", "{local_rank}"), world_size=2,
        command="launcher -m pkg.train",
    )  # fmt: skip
    found = plan.plan(StudySpec.of_command(how, {"global_batch": "free"}), bench.executor, tmp_path / "study")
    assert found.world_size == 2 and facts(found) == (8, 2, BOTH)
    assert bench.applied(found, micro_batch_size=5).samples_per_step == 5 * 2 * 2
    assert "'--local_rank': '1'" in bench.folder.log(1).read_text()


def test_the_flags_that_carry_something_are_known_by_all_their_names(bench, tmp_path):
    script = bench.plan("dict_config.py").workload.script
    assert script.flags == {"micro_batch_size": ["--batch_size"]}
    lines = (SCRIPTS / "dict_config.py").read_text().splitlines()
    name, _, line = script.initialized_at.partition(":")
    assert name == "dict_config.py" and "deepspeed.initialize(" in lines[int(line) - 1] and not script.written_config
    script = bench.plan("training_data.py").workload.script
    assert script.flags["ds_config"] == ["--deepspeed_config"] and script.config_source.endswith("ds.json")
    path = tmp_path / "z1.json"
    path.write_text(json.dumps(CONFIG))
    script = bench.plan("training_data.py", "--settings", str(path)).workload.script
    assert script.flags["ds_config"] == ["--settings"] and script.config_source == str(path)
    mapped = bench.plan("own_flags.py", "--mapped", "1").workload.script
    assert mapped.flags == {"micro_batch_size": ["--rows"]} and mapped.config_source == ""


@pytest.mark.cells(3)
@pytest.mark.parametrize(
    ("style", "overrides", "expected"),
    [
        ("workers", {}, (8, 2, BOTH)),
        ("two losses", {}, (8, 2, BOTH)),
        ("iterable", {"script_set": ["BATCH={micro_batch_size}"]}, (8, 2, BOTH)),
        ("own steps", {"script_set": ["ACCUM={gradient_accumulation_steps}"]}, (8, 4, BOTH)),
        ("own steps", {}, (8, 4, MICRO)),
        *((style, {}, (8, 2, ACCUM)) for style in ("own sampler", "iterable", "only eight")),
        *((style, {}, (8, 2, BOTH)) for style in ("packed", "evaluation mode", "batch sampler", "another model")),
        *((style, {}, (8, 2, BOTH)) for style in ("text flag", "critic", "evaluates", "by name")),
    ],
)
def test_every_style_of_loop_moves_as_far_as_it_can(bench, style, overrides, expected):
    found = bench.plan("styles.py", style, **overrides)
    assert facts(found) == expected
    assert any("more than one model" in text for text in found.workload.caveats) == (style == "critic")
    stage = 0 if found.workload.script.passes > 1 else 3 if found.workload.script.counts_itself else 1
    result = bench.applied(found, steps=4, zero_stage=stage, **dict.fromkeys(found.workload.script.movable, 3))
    assert {"data", "forward", "backward", "step"} <= result.phase_times_s.keys()
    assert min(result.phase_times_s.values()) > 0


@pytest.mark.system
def test_the_steps_of_another_engine_before_the_backward_are_no_part_of_a_models_profile(bench):
    ours, plain = (
        bench.plan("styles.py", style).workload.profile.passes["fp32/0"] for style in ("critic", "text flag")
    )
    assert (ours.n_ops, ours.kept_bytes) == (plain.n_ops, plain.kept_bytes)


def test_a_scripts_step_is_taken_apart_and_traced_and_says_what_it_is_bound_by(bench):
    found = bench.plan("dict_config.py")
    result = bench.applied(found, steps=4, traced_steps=1)
    said = of_result(result, bench.folder.path, found.workload)
    known = {part.name: part.known for part in said.parts}
    assert said.bound_by and "traced" in known["launch overhead"] and "traced" in known["memory bandwidth"]


@pytest.mark.system
def test_what_a_script_does_between_its_calls_is_not_taken_for_loading(bench, tmp_path):
    """A teacher's forward between the batch and the student's read as waiting for data, which more workers would hide."""
    script = tmp_path / "teacher.py"
    text = (SCRIPTS / "dict_config.py").read_text()
    before = "for x, y in loader:\n"
    assert before in text
    script.write_text("import time\n" + text.replace(before, before + "            time.sleep(0.05)\n"))
    found = bench.plan(script)
    result = bench.applied(found, steps=4, gradient_accumulation_steps=2)
    assert result.phase_times_s["script"] > 0.09 > 0.05 > result.phase_times_s["data"] > 0
    said = of_result(result, bench.folder.path, found.workload)
    assert said.bound_by == "the script itself" and not any("data" in note and "waiting" in note for note in said.notes)


@pytest.mark.system
def test_a_schedule_that_moves_with_each_micro_batch_is_said_to_move_more_or_less_often(bench):
    found = bench.plan("styles.py", "schedule", global_batch="keep")
    assert any("moves its learning rate with each micro-batch" in note for note in found.notes)
    changes = bench.measure(found, micro_batch_size=16, gradient_accumulation_steps=1).side_changes
    assert any(text.startswith("Schedule:") and "by 0.5" in text for text in changes)
    plain = bench.plan("styles.py", "text flag", global_batch="keep").workload.script
    assert found.workload.script.paced and not plain.paced


def test_what_cannot_run_otherwise_is_frozen_with_the_reason(bench):
    """Where the global batch is kept, the other one was left out in silence, though it was said to move."""
    notes = bench.plan("styles.py", "only eight", global_batch="keep").notes
    assert any("with micro-batch 4 " in note and "eight samples here" in note for note in notes)
    assert any(note.startswith("the accumulation stays ") and "too: the global batch is kept" in note for note in notes)


def test_a_script_that_counts_its_micro_batches_keeps_its_own_accumulation(bench):
    found = bench.plan("styles.py", "own steps")
    assert found.ds_config(found.baseline)["gradient_accumulation_steps"] == 1


@pytest.mark.cells(1)
@pytest.mark.parametrize(("style", "times"), [("two losses", 1.5), ("own steps", 1)])
def test_stages_that_lose_gradients_of_several_passes_are_not_tried(bench, style, times):
    """They trained on those of the last pass alone, and were recommended as drop-in; each loss counted as a micro-batch."""
    found = bench.plan("styles.py", style)
    plain = bench.plan("styles.py", "text flag")
    refused = [why_illegal(replace(found.baseline, zero_stage=stage), found.setting) for stage in (0, 1, 2)]
    assert refused[0] is None and all("lose gradients" in why for why in refused[1:])
    assert why_illegal(replace(plain.baseline, zero_stage=1), plain.setting) is None
    losses = [bench.applied(each).losses[0] for each in (found, plain)]
    assert losses[0] == pytest.approx(times * losses[1], rel=0.3)


def test_a_script_at_a_stage_that_loses_gradients_is_told_so(bench, tmp_path):
    for name in ("common.py", "loops.py", "styles.py"):
        text = (SCRIPTS / name).read_text().replace("itself = {", 'itself = {"zero_optimization": {"stage": 2}, ')
        (tmp_path / name).write_text(text)
    found = bench.plan(tmp_path / "styles.py", "own steps")
    assert any("goes backward 4 times" in note and "ZeRO 2 loses gradients" in note for note in found.notes)
    assert why_illegal(replace(found.baseline, zero_stage=1), found.setting) is None
    assert "lose gradients" in why_illegal(replace(found.baseline, zero_stage=0), found.setting)


def test_a_script_that_splits_its_sequences_over_ranks_is_measured_as_it_is(bench, tmp_path):
    """Nothing in its configuration says so: each of its trials was not applied."""
    (tmp_path / "train.py").write_text(SPLIT_SEQUENCES)
    found = bench.plan(tmp_path / "train.py", ranks=2)
    result = bench.applied(found, micro_batch_size=2)
    assert (result.samples_per_step, result.tokens_per_step) == (2, 2 * 16)
    # It was tried in a trial, and not applied.
    assert "splits its sequences" in why_illegal(replace(found.baseline, zero_stage=3), found.setting)


@pytest.mark.parametrize(("drawn", "unsure"), [(0, True), (32, False)])
def test_samples_that_were_counted_by_a_dimension_that_varies_are_said_to_be(drawn, unsure):
    """Identifiers of a table's rows, all samples' in one row, read as 131 to 195 samples without a word on how they were counted."""
    seen = Observed(
        micro_batch_size=164, loader_batch_size=None, gradient_accumulation_steps=1, samples_per_step=328,
        tokens_per_step=None, zero_stage=0, dtype="float32", uneven=(131, 195),
    )  # fmt: skip
    said = _how_counted(seen, 32, SimpleNamespace(draw_size=drawn))
    assert "131 to 195 samples" in said and ("DeepSpeed's configuration states 32" in said) == unsure


def test_a_batch_that_is_cut_into_parts_is_scored_by_what_flowed(bench):
    found = bench.plan("parts.py", "--parts", "4", "--samples", "100")
    result = bench.applied(found, steps=12, micro_batch_size=5, gradient_accumulation_steps=2)
    assert set(result.taken_in["samples"]) <= {10, 2} and len(result.step_times_s) == 12
    assert any("`batch_size=20` instead of 24" in change for change in result.side_changes)


@pytest.mark.parametrize(
    ("style", "overrides", "n_samples"),
    [("workers", {}, 4096), ("iterable", {"script_set": ["BATCH={micro_batch_size}"]}, None)],
)
def test_the_samples_of_a_scripts_data_set_are_counted_where_it_has_a_length(bench, style, overrides, n_samples):
    """`check` said "no fixed size" of every script's data."""
    assert bench.plan("styles.py", style, **overrides).workload.n_samples == n_samples


def test_texts_of_any_length_are_counted_step_by_step(bench):
    result = bench.applied(bench.plan("lengths.py"), steps=20)
    tokens, real = result.taken_in["tokens"], result.taken_in["real_tokens"]
    assert set(tokens) == {16 * 16, 8 * 16 + 8 * 512} and set(real) == {16 * 16, 15 * 16 + 512}
    assert result.taken_in["samples"] == [16] and result.tokens_per_step == round(sum(tokens) / 20)
    timed = slice(result.steps.n_warmup, None)
    # Counting the longest step's tokens at an ordinary step's time would be 16 times as many; steps that a busy machine
    # interrupts are cut, and may be half of this short trial's time.
    total = sum(real[timed]) / sum(result.step_times_s[timed])
    assert total / 2 < METRICS["tokens_per_s"].of(result, None).value < 2 * total


@pytest.mark.system
def test_batches_of_varying_sizes_are_measured_as_they_come(bench):
    found = bench.plan("lengths.py", "budget")
    script = found.workload.script
    assert script.uneven == (1, 9) and "micro_batch_size" not in script.movable
    assert found.ds_config(found.baseline)["train_micro_batch_size_per_gpu"] == script.configured_micro_batch_size
    assert any("the script decides how many samples" in note for note in found.notes)
    check = TailCheck(longest_at=found.workload.data.longest_at)
    result = bench.measure(found, steps=20, gradient_accumulation_steps=1, tail=check)
    assert result.outcome is Outcome.COMPLETE, result.reason
    assert set(result.taken_in["samples"]) >= {1, 5, 9} and result.tail == {
        "samples": 1,
        "length": 512,
        "elements": 1024,
    }


@pytest.mark.system
def test_a_batch_of_which_a_second_loaders_part_stays_is_frozen_unless_the_user_moves_it(bench):
    found = bench.plan("styles.py", "two loaders")
    assert facts(found) == (8, 2, ACCUM)
    assert any("takes 16 samples of another DataLoader" in note for note in found.notes)
    assert any("--other {micro_batch_size}*2" in note for note in found.notes)
    moved = bench.plan("styles.py", "two loaders", script_set=["BATCH={micro_batch_size}"])
    assert facts(moved) == (8, 2, BOTH)


@pytest.mark.system
def test_a_constant_that_is_cut_up_is_to_be_multiplied_and_stays_until_then(bench):
    """Each trial, the baseline too, set it to the micro-batch that was counted, and so trained with another batch."""
    found = bench.plan("parts.py", "--style", "hand-made", script_set=["BIG={micro_batch_size}"])
    said = [note for note in found.notes if "4 micro-batches of each batch" in note]
    assert said and "--set NAME={micro_batch_size}*4`" in said[0]
    assert not any("BIG" in text for text in found.workload.script.moved_by)
    assert bench.applied(found, zero_stage=1).side_changes == []


@pytest.mark.system
def test_the_size_of_the_parts_into_which_a_batch_is_cut_is_to_be_passed(bench):
    """It was said to make so many micro-batches of each batch, and to pass a multiple, which moved nothing."""
    found = bench.plan("parts.py", "--style", "split")
    said = next(note for note in found.notes if note.startswith("the micro-batch stays 8"))
    assert "into parts of that size" in said and "*" not in said and "`PART` has the value 8" in said


@pytest.mark.system
def test_a_big_batch_cut_up_by_a_constant_moves_as_a_whole(bench):
    found = bench.plan("chunks.py", script_set=["ACCUM={gradient_accumulation_steps}"], global_batch="keep")
    assert facts(found) == (8, 4, BOTH)


@pytest.mark.system
def test_another_model_that_steps_with_each_micro_batch_is_said_not_to_follow_the_accumulation(bench):
    found = bench.plan("styles.py", "another model", global_batch="keep")
    assert found.workload.script.paced_beside and not found.workload.script.paced
    assert any(note.startswith("the script trains another model") for note in found.notes)
    assert not bench.plan("from_engine.py", global_batch="keep").workload.script.paced_beside


def test_words_that_a_script_reads_itself_move_batch_and_accumulation(bench):
    found = bench.plan("own_flags.py", "--train.batch-size", "6", "--train.accum", "4")
    result = bench.applied(found, micro_batch_size=3, gradient_accumulation_steps=2)
    assert sorted(result.side_changes) == [
        "Command line: `--train.accum 2` instead of 4.", "Command line: `--train.batch-size 3` instead of 6.",
    ]  # fmt: skip


@pytest.mark.system
def test_a_word_of_the_command_line_is_moved_rather_than_the_code_that_it_reaches(bench):
    """The answer named the DataLoader's line, and the printed command kept the word's old value."""
    found = bench.plan("own_flags.py", "--train.batch-size", "6", "--loader", "yes")
    assert found.workload.script.flags["micro_batch_size"] == ["--train.batch-size"]
    said = found.workload.script.moved_by
    assert "Command line: `--train.batch-size 3` instead of 6." in said and not any(
        "DataLoader" in text for text in said
    )


def test_inputs_are_cast_only_where_the_script_was_written_for_another_precision(bench):
    found = bench.plan("dict_config.py")
    assert not any("cast" in change for change in bench.measure(found).side_changes)
    assert any("cast" in change for change in bench.measure(found, precision="bf16").side_changes)


@pytest.mark.system
def test_a_scripts_own_recomputation_is_the_baselines_and_can_be_turned_off(bench):
    found = bench.plan("recomputes.py")
    passes = found.workload.profile.passes
    assert found.baseline.checkpoint_every == 1 and passes["fp32/1"].kept_bytes[1] < passes["fp32/0"].kept_bytes[1]
    for every, blocks in ((1, 4), (2, 2), (0, 0)):
        result = bench.measure(found, checkpoint_every=every)
        assert result.outcome is Outcome.COMPLETE and result.observed.checkpointed_blocks == blocks
        assert ("recompute" in result.phase_times_s) is bool(every)


def test_what_does_not_move_is_frozen_with_the_remedy(bench):
    found = bench.plan("hand_made.py")
    assert set(found.space["micro_batch_size"].all_values()) == {8}
    assert any("--set NAME={micro_batch_size}" in note for note in found.notes)


RUNS = {
    "z0": {"zero_stage": 0, "micro_batch_size": 2, "gradient_accumulation_steps": 1},
    "z1": {"zero_stage": 1, "precision": "bf16", "micro_batch_size": 4, "checkpoint_every": 1},
    "z2": {"zero_stage": 2, "micro_batch_size": 3, "gradient_accumulation_steps": 3},
    "z3": {"zero_stage": 3, "precision": "torch_autocast", "micro_batch_size": 5, "checkpoint_every": 2},
}
RUN_NOW = {"training_data.py": "z3", "own_loader.py": "z0", "from_engine.py": "z1"}


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("name", "cell"),
    [*RUN_NOW.items(), *(each for each in itertools.product(RUN_NOW, RUNS) if each not in RUN_NOW.items())],
)
def test_a_trial_on_two_ranks_runs_what_was_asked_for(bench, name, cell):
    result = bench.applied(bench.plan(name, ranks=2), steps=4, **RUNS[cell])
    assert len(result.step_times_s) == 4


@pytest.mark.system
@pytest.mark.smoke
def test_hooks_change_no_digit_of_the_loss(bench, tmp_path):
    result = bench.applied(bench.plan("dict_config.py"), steps=10)
    own = losses_without_hooks("dict_config.py", "--steps", "10", ranks=1, cwd=tmp_path)
    assert result.losses == own and len(own) == 10


@pytest.mark.system
def test_a_script_that_seeds_nothing_begins_alike_in_each_trial(bench):
    found = bench.plan("unseeded.py")
    first, second = (bench.applied(found, steps=3).losses for _ in range(2))
    assert first == second and len(first) == 3


@pytest.mark.system
def test_what_carried_the_batch_is_told(bench):
    for name, said in (
        ("dict_config.py", "--batch_size 3` instead of 8"),
        ("own_loader.py", "DataLoader at own_loader.py:15 with `batch_size=3` instead of 8"),
    ):
        assert said in str(bench.applied(bench.plan(name), micro_batch_size=3).side_changes)
    changes = bench.applied(bench.plan("styles.py", "workers"), micro_batch_size=3).side_changes
    assert "with `batch_size=3` instead of 8, which is `batch` there." in str(changes)


def test_a_loader_that_is_only_evaluated_is_no_change_to_make(bench):
    """With a micro-batch of 1 it draws the 8 samples that the script trained on at once."""
    changes = bench.applied(bench.plan("styles.py", "evaluates"), micro_batch_size=1).side_changes
    assert len([change for change in changes if "with `batch_size=1` instead of 8" in change]) == 1


@pytest.mark.system
def test_the_type_of_a_loss_in_16_bits_is_reported(bench):
    found = bench.plan("still.py")
    assert bench.applied(found).loss_dtype == ""
    assert bench.applied(found, precision="bf16").loss_dtype == "bfloat16"


def test_nothing_that_was_not_seen_is_scored(bench):
    result = bench.measure(bench.plan("hand_made.py"), micro_batch_size=3)
    assert result.outcome is Outcome.NOT_APPLIED and "micro_batch_size: 3 was asked for, 8 ran" in result.reason


def test_a_plain_backward_is_not_tried_at_stage_0_where_deepspeed_refuses_it(bench):
    found = bench.plan("hand_made.py")
    assert "refuses loss.backward()" in why_illegal(replace(found.baseline, zero_stage=0), found.setting)
    assert bench.measure(found, legal=False, zero_stage=0).outcome is Outcome.CRASHED


def test_a_plain_backward_is_not_tried_with_loss_scaling_which_deepspeed_refuses_without_its_own_call(bench):
    found = bench.plan("hand_made.py")
    fp16 = replace(found.baseline, zero_stage=1, precision="torch_autocast_fp16")
    assert "engine.scale(loss)" in why_illegal(fp16, replace(found.setting, fp16=True))
    result = bench.measure(found, legal=False, zero_stage=1, precision="torch_autocast_fp16")
    assert result.outcome is Outcome.CRASHED and "Loss scaling is required" in result.reason
    scaled = bench.plan("styles.py", "scales")
    assert scaled.setting.plain_backward and scaled.setting.scales


@pytest.mark.system
def test_a_model_that_trains_through_another_is_cast_for_and_not_tried_where_deepspeed_refuses_it(bench):
    """As in adversarial training, whichever model is first: its trials in 16 bits and those at stage 0 crashed."""
    for style in ("judged second", "judged"):
        found = bench.plan("styles.py", style)
        assert "from another engine" in why_illegal(replace(found.baseline, zero_stage=0), found.setting)
    result = bench.measure(found, precision="bf16")
    assert result.outcome is Outcome.COMPLETE, result.reason


def test_memory_that_runs_out_ends_a_trial_whose_script_would_go_on_with_a_smaller_batch(bench):
    """The smaller batch ran, and its trial was called one that does not apply its batch."""
    found = bench.plan("styles.py", "halves", script_set=["BATCH=4"])
    result = bench.measure(found, gradient_accumulation_steps=1, micro_batch_size=8, legal=False)
    assert result.outcome is Outcome.OOM and "out of memory" in result.reason


def test_an_evaluation_before_the_training_takes_no_time_of_the_steps(bench):
    """It used up the time budget, and the tail check looked for the longest samples among the evaluation's."""
    found = bench.plan("styles.py", "evaluates first")
    result = bench.measure(found, tail=TailCheck(longest_at=tuple(range(4000, 4016))))
    assert result.outcome is Outcome.COMPLETE and found.workload.n_samples == 4096
    began = {event["phase"]: event["time"] for event in events(bench.folder) if "phase" in event}
    assert sum(result.step_times_s) < began["warmup"] - began["first_evaluation"]


@pytest.mark.system
@pytest.mark.parametrize(
    ("style", "n_slow"),
    [
        *(pytest.param(*each, marks=pytest.mark.system) for each in (("evaluates at times", 0), ("labels", 5))),
        ("plays", 3),
    ],
)
def test_an_evaluation_of_some_steps_is_no_part_of_them_but_what_is_then_trained_on_is(bench, style, n_slow):
    """Every second step has calls without gradients, and half a second of sleep; or each step."""
    result = bench.measure(bench.plan("styles.py", style), steps=6)
    assert result.outcome is Outcome.COMPLETE, result.reason
    assert sum(seconds > 0.5 for seconds in result.step_times_s) == n_slow
    assert any("evaluates between its steps" in caveat for caveat in result.caveats) == (not n_slow)


@pytest.mark.system
def test_losses_that_a_script_divides_as_deepspeed_does_again_are_compared_undivided(bench):
    """Each other accumulation read as another loss, and the fastest configurations were refused for it."""
    found = bench.plan("styles.py", "divides")
    assert found.workload.script.divides and any("divides the loss" in note for note in found.notes)
    assert not bench.plan("styles.py", "by rows", global_batch="keep").workload.script.divides
    results = [bench.applied(found, gradient_accumulation_steps=n) for n in (1, 4)]
    losses = [result.losses[0] for result in results]
    assert max(losses) < 1.5 * min(losses)
    assert "Gradient: it is 2 times as large" in str(results[0].side_changes)


@pytest.mark.cells(1)
@pytest.mark.parametrize(("style", "adds_up"), [("divides own steps", False), ("own steps", True)])
def test_only_a_script_that_counts_micro_batches_itself_and_does_not_divide_has_a_gradient_that_grows(
    bench, style, adds_up
):
    """DeepSpeed divides by its own number, which stays: the division was called a second one, and its lack passed as drop-in."""
    found = bench.plan("styles.py", style, script_set=["ACCUM={gradient_accumulation_steps}"])
    assert found.baseline.gradient_accumulation_steps == 4 and set(found.workload.script.movable) >= ACCUM
    assert any("adds up the losses" in note for note in found.notes) == adds_up
    assert not any("DeepSpeed does so again" in note for note in found.notes)
    results = [bench.applied(found, gradient_accumulation_steps=n) for n in (4, 2)]
    losses = [result.losses[0] for result in results]
    assert max(losses) < 1.5 * min(losses)
    assert ("Gradient: it is 0.5 times as large" in str(results[1].side_changes)) == adds_up


@pytest.mark.system
def test_a_script_of_one_micro_batch_a_step_that_counts_them_itself_is_found_out_by_its_second_run(bench, tmp_path):
    """DeepSpeed was told the number, too, and stepped after its square; the script was said to step as before."""
    for name in ("common.py", "loops.py", "styles.py"):
        (tmp_path / name).write_text((SCRIPTS / name).read_text().replace("ACCUM = 4", "ACCUM = 1"))
    found = bench.plan(tmp_path / "styles.py", "divides own steps", script_set=["ACCUM={gradient_accumulation_steps}"])
    assert found.baseline.gradient_accumulation_steps == 1 and set(found.workload.script.movable) >= ACCUM
    assert bench.applied(found, gradient_accumulation_steps=4).observed.gradient_accumulation_steps == 4


def test_a_study_of_another_command_line_is_another_study(bench):
    found = bench.plan("dict_config.py"), bench.plan("dict_config.py", "--batch_size", "4")
    assert found[0].fingerprint["script"] != found[1].fingerprint["script"]


def test_ranks_fed_the_same_data_are_warned_about(bench):
    assert any("same data" in note for note in bench.plan("hand_made.py", ranks=2).notes)
    assert not any("same data" in note for note in bench.plan("training_data.py", ranks=2).notes)


def test_a_trial_leaves_nothing_in_the_users_folder(bench):
    result = bench.applied(bench.plan("own_loader.py"), steps=30)
    assert "torch.save of the model is not carried out in trials" in result.caveats


def test_what_a_script_saves_for_itself_it_can_read_and_nobody_finds_later(bench):
    result = bench.applied(bench.plan("saves.py", ranks=2), steps=4)
    assert "torch.save of the model is not carried out in trials" in result.caveats
    assert not bench.folder.scratch.exists()


@pytest.mark.system
def test_a_file_that_a_script_writes_by_itself_is_told_and_an_earlier_checkpoint_stays(bench, home):
    old = home / "out" / "checkpoints" / "epoch-1"
    old.mkdir(parents=True)
    found = bench.plan("saves.py", "--log")
    assert old.exists() and any(
        "removes or replaces out/checkpoints, which was there before" in note for note in found.notes
    )
    assert any(note == f"{WRITES_FILES}out/log.txt" for note in found.notes)
    shutil.rmtree(home / "out")


@pytest.mark.cells(7)
@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("saves.py", ("--reload",), "best.pt back, but trials do not save the model"),
        ("no_engine.py", (), "without calling deepspeed.initialize with an optimizer: give it the flags"),
        ("dict_config.py", ("--no-such-flag",), "exited with status 2"),
        (
            "dict_config.py",
            ("--steps", "0"),
            r"without calling the engine's step\(\).*checkpoint of a finished training",
        ),
        ("exits.py", ("--spawns",), "starts its ranks itself"),
        ("exits.py", ("--asks",), r"asks for input \(Go on\? \), which nobody gives"),
        ("dict_config.py", ("--steps", "4"), "ended by itself after 4 optimizer steps, and 5 are needed"),
        ("exits.py", ("--caught",), r"it exits at exits.py:40; it caught an exception of the engine's: Runtime.*8x5"),
        ("exits.py", ("--leaves",), "ended by itself after 2 optimizer steps.*it exits at exits.py:26"),
        ("exits.py", ("--phases",), "went on to train another model .* after 2 optimizer steps, and 5 are needed"),
        ("exits.py", (), "exited with status 1 after TypeError: .*no_such"),
        ("exits.py", ("--said",), "the script ended itself: no data in /data"),
        ("styles.py", ("module",), "trains without calling the engine"),
        ("styles.py", ("halves",), "out of memory.*Give the script a batch that fits"),
        ("stranger.py", (), "the optimizer given to deepspeed.initialize holds none of the model's parameters"),
    ],
)
def test_a_script_that_cannot_be_probed_is_refused_with_its_log(bench, name, arguments, said):
    with pytest.raises(UserError, match=said) as error:
        bench.plan(name, *arguments)
    assert "rank-0.log" in str(error.value)


@pytest.mark.system
def test_a_script_that_ends_on_one_rank_before_the_others_is_told_from_one_that_hangs(bench):
    """Both read "it had loaded and begun to train"."""
    with pytest.raises(UserError, match="no end within 4 s; it had ended on one rank while others still trained"):
        bench.plan("exits.py", "--uneven", ranks=2, trial_budget_s=1, trial_deadline_s=4)


def test_a_script_that_makes_its_batches_by_hand_evaluates_and_saves_where_that_is_asked_for(bench):
    """Without a loader to yield the longest batch both were left out without a word."""
    result = bench.measure(bench.plan("hand_made.py"), tail=TailCheck(evaluate=True, save=True))
    assert {"evaluate", "save"} <= result.memory_by_phase_bytes.keys()
    assert result.tail == {"samples": 8, "length": 16, "elements": 128}


def test_too_few_steps_are_no_measurement(bench):
    found = bench.plan("dict_config.py", "--steps", "8")
    result = bench.measure(found, steps=100, gradient_accumulation_steps=2)
    assert result.outcome is Outcome.TOO_FEW_STEPS, "nothing crashed"
    assert (
        "ended by itself after 4 optimizer steps of 2 micro-batches, and 5 are needed: give it more steps"
        in result.reason
    )
