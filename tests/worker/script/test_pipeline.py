"""Scripts whose model is a `PipelineModule`, in real ranks: two stages, and one stage on two ranks."""

from dataclasses import replace

import pytest
from support.bench import losses_without_hooks

from autotune.space.legality import why_illegal
from autotune.trial.request import TailCheck

pytestmark = pytest.mark.process

STAGES, PARTITION = "pipeline.stages", "pipeline.partition"


@pytest.mark.parametrize(("stages", "global_batch"), [(2, 16), pytest.param(1, 32, marks=pytest.mark.system)])
def test_samples_are_those_of_the_data_parallel_ranks(bench, stages, global_batch):
    found = bench.plan("pipeline.py", "--stages", str(stages), ranks=2)
    assert found.workload.script.family == "DeepSpeed PipelineModule"
    assert set(found.workload.script.movable) == {"micro_batch_size", "gradient_accumulation_steps"}
    assert found.workload.n_parameters == (16 * 16 + 16) * 4 + 16 * 4 + 4 and found.workload.n_blocks == 5
    assert bench.applied(found).samples_per_step == global_batch


@pytest.mark.cells(2)
@pytest.mark.parametrize(
    "changes",
    [
        {"zero_stage": 1, "precision": "bf16", "micro_batch_size": 4, "checkpoint_every": 1},
        {"precision": "torch_autocast", "gradient_accumulation_steps": 1},
        {"zero_stage": 1, "micro_batch_size": 2, "gradient_accumulation_steps": 3, "checkpoint_every": 2},
    ],
    ids=["bf16", "autocast", "fp32"],
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


@pytest.mark.system
def test_the_scripts_own_recomputation_is_the_baselines_and_can_be_turned_off(bench):
    found = bench.plan("pipeline.py", "--stages", "2", "--recompute", "2", ranks=2)
    assert found.baseline.checkpoint_every == 2
    assert bench.applied(found).observed.checkpointed_blocks == 5
    off = bench.applied(found, checkpoint_every=0)
    assert off.observed.checkpointed_blocks == 0 and "activation_checkpoint_interval=0" in str(off.side_changes)


def test_recomputing_is_a_matter_of_the_json_and_changes_no_loss(bench):
    found = bench.plan("pipeline.py", "--stages", "2", ranks=2)
    candidate = replace(found.baseline, checkpoint_every=2)
    recomputing = {"activation_checkpoint_interval": 2, "use_reentrant": False}
    assert found.ds_config(candidate)["pipeline"] == {"stages": 2, **recomputing}
    plain, recomputed = bench.applied(found), bench.applied(found, checkpoint_every=2)
    assert plain.losses == recomputed.losses and not recomputed.side_changes


@pytest.mark.system
def test_a_replicate_of_a_pipeline_differs_by_rounding(bench):
    """It was the original run itself, whose chance differences the gate then took for none."""
    found = bench.plan("pipeline.py", "--stages", "2", ranks=2)
    own, other = (bench.measure(found, replicate=n, tail=TailCheck(evaluate=True, save=True)) for n in (0, 1))
    assert own.losses != other.losses == pytest.approx(own.losses, rel=5e-3)
    assert own.tail["samples"] == 8 and "save" in own.memory_by_phase_bytes  # it read "0 x 16"


@pytest.mark.system
def test_hooks_change_no_digit_of_a_pipelines_loss(bench, tmp_path):
    own = losses_without_hooks("pipeline.py", "--stages", "2", "--steps", "12", ranks=2, cwd=tmp_path)
    assert bench.applied(bench.plan("pipeline.py", "--stages", "2", ranks=2), steps=12).losses == own and len(own) == 12


@pytest.mark.system
def test_stages_and_partition_are_moved_and_witnessed(bench):
    found = bench.plan("pipeline.py", "--stages", "2", ranks=2)
    assert found.baseline.pipeline_degree == 2 and found.workload.pipeline.partition == "parameters"
    one = bench.applied(found, config=(), changed_from={STAGES: 2})
    assert one.observed.groups.pipeline == 1 and one.samples_per_step == 2 * found.baseline.global_batch_size(2)
    assert "PipelineModule(..., num_stages=1)" in str(one.side_changes)
    by_class = bench.applied(found, config=((PARTITION, "type:Linear"), (STAGES, 2)), changed_from={PARTITION: None})
    assert "partition_method='type:Linear'" in str(by_class.side_changes) and not by_class.observed.unwitnessed
    assert by_class.observed.groups.held_parameters > one.observed.groups.held_parameters // 2


def test_stages_that_the_layers_do_not_fill_are_refused(bench):
    found = bench.plan("pipeline.py", "--stages", "2", ranks=2)
    wide = replace(found.setting, world_size=6, ranks_per_node=6)

    def refusal(stages, **more):
        config = tuple(sorted({STAGES: stages, **more}.items()))
        return why_illegal(replace(found.baseline, config=config), wide)

    assert "5 layers, too few for 6 stages" in refusal(6)
    assert refusal(3) is None and "does not divide the 6 ranks" in refusal(4)
    assert "share" in refusal(2, **{PARTITION: "parameters"})
    assert "others that are possible: uniform, type:Linear, type:Block" in refusal(2, **{PARTITION: "profile"})
