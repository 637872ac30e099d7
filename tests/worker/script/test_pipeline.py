"""Scripts whose model is a `PipelineModule`, in real ranks: two stages, and one stage on two ranks."""

from dataclasses import replace

import pytest
from support.bench import losses_without_hooks

from autotune.space.legality import why_illegal

pytestmark = pytest.mark.process


@pytest.mark.parametrize(("stages", "global_batch"), [(2, 16), (1, 32)])
def test_samples_are_those_of_the_data_parallel_ranks(bench, stages, global_batch):
    found = bench.plan("pipeline.py", "--stages", str(stages), ranks=2)
    assert found.workload.script.family == "DeepSpeed PipelineModule"
    assert set(found.workload.script.movable) == {"micro_batch_size", "gradient_accumulation_steps"}
    assert found.workload.n_parameters == (16 * 16 + 16) * 4 + 16 * 4 + 4 and found.workload.n_blocks == 5
    assert bench.applied(found).samples_per_step == global_batch


@pytest.mark.parametrize(
    "changes",
    [
        {"zero_stage": 1, "precision": "bf16", "micro_batch_size": 4, "checkpoint_every": 1},
        {"zero_stage": 1, "micro_batch_size": 2, "gradient_accumulation_steps": 3, "checkpoint_every": 2},
        {"precision": "torch_autocast", "gradient_accumulation_steps": 1},
    ],
    ids=["bf16", "fp32", "autocast"],
)
@pytest.mark.parametrize(
    "arguments", [("--stages", "2"), ("--stages", "1", "--own-loader")], ids=["two stages", "one stage"]
)
def test_what_was_asked_for_runs(bench, arguments, changes):
    result = bench.applied(bench.plan("pipeline.py", *arguments, ranks=2), **changes)
    assert all(result.phase_times_s[name] > 0 for name in ("data", "forward", "backward", "step"))
    assert bool(changes.get("checkpoint_every")) == bool(result.observed.checkpointed_blocks)


def test_a_stage_of_zero_that_shares_out_the_model_is_not_tried(bench):
    found = bench.plan("pipeline.py", "--stages", "2", ranks=2)
    assert "PipelineModule" in why_illegal(replace(found.baseline, zero_stage=2), found.setting)
    assert set(found.space["zero_stage"].all_values()) == {0, 1}


def test_the_scripts_own_recomputation_is_the_baselines_and_can_be_turned_off(bench):
    found = bench.plan("pipeline.py", "--stages", "2", "--recompute", "2", ranks=2)
    assert found.baseline.checkpoint_every == 2
    assert bench.applied(found).observed.checkpointed_blocks == 5
    off = bench.applied(found, checkpoint_every=0)
    assert off.observed.checkpointed_blocks == 0 and "activation_checkpoint_interval=0" in str(off.side_changes)


def test_recomputing_is_a_matter_of_the_json_and_changes_no_loss(bench):
    found = bench.plan("pipeline.py", "--stages", "2", ranks=2)
    candidate = replace(found.baseline, checkpoint_every=2)
    assert found.ds_config(candidate)["pipeline"] == {"activation_checkpoint_interval": 2, "use_reentrant": False}
    plain, recomputed = bench.applied(found), bench.applied(found, checkpoint_every=2)
    assert plain.losses == recomputed.losses and not recomputed.side_changes


def test_hooks_change_no_digit_of_a_pipelines_loss(bench, tmp_path):
    own = losses_without_hooks("pipeline.py", "--stages", "2", "--steps", "12", ranks=2, cwd=tmp_path)
    assert bench.applied(bench.plan("pipeline.py", "--stages", "2", ranks=2), steps=12).losses == own and len(own) == 12
