"""What a plan makes of settings that both the user's configuration states and the space tunes."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.instant import ENVIRONMENT, WORKLOAD, plan_of, spec_of
from support.paths import MODELS

from autotune.errors import UserError
from autotune.space.candidate import Candidate
from autotune.space.legality import why_illegal
from autotune.study.setup import plan as planning
from autotune.study.setup import profile_cache
from autotune.study.spec.spec import StudySpec
from autotune.trial.workload import Probed, Splitting

ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("# why\nx = 1  # one\n\n\ny = '# no comment'\n", True),
        ("x = 1\ny = '# another'\n", False),
        ("x = 2\ny = '# no comment'\n", False),
        ("x = 1\r\ny = '# no comment'\r\n", True),
        ("x = 1\n\x0c\n# one\ny = '# no comment'\n", True),
        ("x = (\n", False),
    ],
)
def test_a_comment_makes_no_other_target(tmp_path, text, same):
    """`autotune run` refused to go on with the study, and `changes` said that nothing had changed."""
    before, now = tmp_path / "before.py", tmp_path / "now.py"
    before.write_text("x = 1\ny = '# no comment'\n")
    now.write_bytes(text.encode())
    assert (planning.target_digest(before) == planning.target_digest(now)) == same


@pytest.fixture
def planned(monkeypatch, tmp_path):
    """Returns the plan of a study of two ranks on a CPU with this configuration and space."""

    def make(base, space, workload=WORKLOAD, **more):
        monkeypatch.setattr(planning, "inspect_workload", lambda *_: workload)
        (tmp_path / "model.py").write_text((MODELS / "ok.py").read_text())
        base = {"train_micro_batch_size_per_gpu": 8, "optimizer": ADAM, **base}
        spec = StudySpec.of(
            tmp_path / "model.py", {"name": "s", "ranks": 2, "base_config": base, "space": space, **more}
        )
        executor = SimpleNamespace(cold_reason="", turn=lambda _: contextlib.nullcontext())
        return planning.plan(spec, executor, tmp_path)

    return make


def test_a_study_without_degrees_keeps_what_is_known_of_them(planned, tmp_path, monkeypatch):
    """It wrote the findings about the model anew, without the comparisons, which the next study with degrees made again."""
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / "cache"))
    target = tmp_path / "model.py"
    target.write_text((MODELS / "ok.py").read_text())
    whole, compared = (
        replace(WORKLOAD, splitting=Splitting(heads=4)),
        {"tensor_parallel.autotp_size=2 of 2 {}": "the loss is 4.9"},
    )
    known = replace(whole, splitting=replace(whole.splitting, compared=compared))
    profile_cache.save(known, profile_cache.workload_key(target, True))
    assert planned({}, {"zero_stage": [0, 1]}, workload=whole).workload.splitting.compared == compared


def test_a_candidate_at_deepspeeds_default_does_not_inherit_the_users_value(planned):
    zero = {"stage": 2, "contiguous_gradients": False, "reduce_bucket_size": 2e4}
    space = {
        "zero_stage": [2, 3],
        "zero_optimization.contiguous_gradients": {"choices": [None, False], "when": {"zero_stage": 2}},
        "zero_optimization.reduce_bucket_size": [20_000, 500_000_000],
        "gradient_clipping": [None, 1.0],
    }
    found = planned({"zero_optimization": zero, "gradient_clipping": 1}, space)
    assert found.ds_config(found.baseline) == {
        "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1, "optimizer": ADAM, "gradient_clipping": 1,
        "zero_optimization": zero,
    }  # fmt: skip
    candidates = list(found.space.candidates(found.baseline))
    assert found.baseline.key in {each.key for each in candidates}
    configs = [found.ds_config(each) for each in candidates]
    assert all(configs.count(config) == 1 for config in configs)
    default = Candidate.of(found.baseline.values() | {"zero_optimization.contiguous_gradients": None})
    assert "contiguous_gradients" not in found.ds_config(default)["zero_optimization"]
    assert default.changes_from(found.baseline) == [
        "zero_optimization.contiguous_gradients DeepSpeed's default instead of false"
    ]
    assert found.baseline.with_own(found.base_config) == found.spec.base_config


@pytest.mark.parametrize(
    ("base", "space", "kept"),
    [
        # A CPU has no streams, so that no candidate may state it.
        (
            {"zero_optimization": {"stage": 2, "overlap_comm": True}},
            {"zero_optimization.overlap_comm": [None, True]},
            True,
        ),
        # Without ZeRO nobody reads it; a candidate that does would inherit it where it leaves it to DeepSpeed.
        ({"zero_optimization": {"reduce_bucket_size": 9}}, {"zero_optimization.reduce_bucket_size": [None, 9]}, False),
        ({"bf16": {"immediate_grad_update": False}}, {"bf16.immediate_grad_update": [None, False]}, False),
    ],
)
def test_a_setting_without_effect_in_the_users_configuration_neither_refuses_it_nor_is_measured_twice(
    planned, base, space, kept
):
    found = planned(base, {"zero_stage": [0, 2], "precision": ["fp32", "bf16"], **space})
    assert found.baseline.config == ()
    assert (found.base_config == found.spec.base_config) is kept
    drawn = list(found.space.candidates(found.baseline))
    configs = [found.ds_config(each) for each in drawn if why_illegal(each, found.setting) is None]
    assert all(configs.count(config) == 1 for config in configs)


def test_where_the_kept_global_batch_leaves_nothing_to_tune_what_frees_it_is_said(planned):
    """A configuration that states its batch keeps it, and no larger micro-batch does; the reason was not said."""
    with pytest.raises(UserError, match=r"its global batch of 16 kept \(--global-batch free lets it vary\)"):
        planned({}, {"micro_batch_size": [8, 16, 32]})
    both = Probed(ds_config={}, micro_batch_size=8, gradient_accumulation_steps=1, model_parallel_size=2)
    with pytest.raises(UserError, match="its global batch of 8 kept"):  # both ranks train one copy of the model
        planned({}, {"micro_batch_size": [8, 16, 32]}, replace(WORKLOAD, script=both))


@pytest.mark.parametrize(("bounds", "n_said"), [("32..64", 1), ("8..64", 0)])
def test_a_baseline_outside_the_bounds_of_the_global_batch_is_said(planned, bounds, n_said):
    """It was recommended where none was better, without a word on the bounds that it breaks."""
    found = planned({}, {"micro_batch_size": [8, 16, 32]}, global_batch=bounds)
    said = [note for note in found.workload.caveats if "global batch of 16 and" in note and bounds in note]
    assert len(said) == n_said and [note for note in found.notes if note in said] == said


def test_trials_at_once_share_the_memory_of_a_host():
    """Each counted the whole: what two trials together had no room for ran all the same, and the kernel ended them."""

    def limit(**changes):
        return plan_of(spec_of(**changes)).memory_limit_bytes

    alone = limit()
    assert limit(parallel=4, overlap=True) == alone / 4
    card = replace(ENVIRONMENT, accelerator="cuda")
    stated = replace(plan_of(spec_of(device_memory_bytes="80GiB")), workload=replace(WORKLOAD, environment=card))
    assert stated.memory_limit_bytes == card.share_bytes(1) < 80 * 2**30  # no more than the card has
    assert limit(parallel=4) == alone and limit(parallel=4, overlap=True, device_memory_bytes="1GiB") == 2**30
