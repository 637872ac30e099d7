"""The changes of a training script that a configuration needs besides its JSON, each said with its code."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.made_up import measured

from autotune.report import load
from autotune.report.script_changes import learning_rate_changes, script_side_changes
from autotune.scoring.convergence.learning_rate import LearningRate
from autotune.space.candidate import Candidate
from autotune.study.setup import sums
from autotune.trial.workload import ACCELERATE, TRAINER, Probed


def changes(values: dict, baseline: dict | None = None) -> str:
    return "\n".join(
        script_side_changes(Candidate.of(values), Candidate.of(baseline or {"micro_batch_size": 8}), "Block")
    )


def test_what_changes_nothing_in_the_script_says_nothing():
    assert changes({"micro_batch_size": 8, "zero_stage": 2, "zero_optimization.overlap_comm": True}) == ""


def test_a_micro_batch_is_changed_in_the_data_loader_and_the_global_batch_is_pointed_out():
    said = changes({"micro_batch_size": 4})
    assert "`DataLoader(..., batch_size=4)`" in said
    assert "yields 1 sample instead of 8" in changes({"micro_batch_size": 1})
    before, after = Candidate(micro_batch_size=8), Candidate(micro_batch_size=4)
    (kept,) = learning_rate_changes(after, before, LearningRate(), in_json=True)
    assert "0.5 times" in kept and "kept your learning rate" in kept
    rate = LearningRate(rule="sqrt", baseline_batch=16)
    (stated,) = learning_rate_changes(after, before, rate, in_json=True)
    (own,) = learning_rate_changes(after, before, rate, in_json=False)
    assert "the JSON states 0.707 times your learning rate" in stated and "multiply your learning rate by 0.707" in own
    assert learning_rate_changes(after, after, rate, in_json=True) == []
    (again,) = learning_rate_changes(after, before, rate, in_json=True, flag="--learning_rate 7e-05")
    assert "transformers wants the same from `--learning_rate 7e-05`" in again


@pytest.mark.parametrize("paced", ["", "number", "loader", "size"])
def test_another_global_batch_has_its_rate_stated_whatever_paces_the_scripts(paced):
    """Of a script that sets its rate by the micro-batch in each step the factor that its trial had was left out."""
    probed = Probed(ds_config={}, micro_batch_size=8, gradient_accumulation_steps=1, paced=paced)
    told = replace(measured(1, accumulation=2), script_side_changes=sums.changes(probed, 2))
    rate = LearningRate(rule="sqrt", baseline_batch=8)
    kept = SimpleNamespace(workload=SimpleNamespace(script=probed), learning_rate=rate)
    [said] = load._rate_changes(told, Candidate(micro_batch_size=8), kept)
    assert "multiply your learning rate by 1.41, as the trials did" in said


def test_a_batch_split_otherwise_keeps_the_learning_rate():
    said = changes({"micro_batch_size": 4, "gradient_accumulation_steps": 2})
    assert "--gradient_accumulation_steps 2" in said and "Learning rate" not in said


CHECKPOINT = "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"


@pytest.mark.parametrize(
    ("now", "before", "said"),
    [
        ({"checkpoint_every": 1}, {}, ["recompute every `Block`:", CHECKPOINT]),
        ({"checkpoint_every": 2}, {}, ["recompute every 2nd `Block`", CHECKPOINT]),
        ({"checkpoint_every": 1}, {"checkpoint_every": 2}, ["recompute every `Block`:", "{\"every_n_layers\": 1}"]),
        ({"checkpoint_every": 4}, {}, ["recompute every 4th `Block`", CHECKPOINT]),
        ({}, {"checkpoint_every": 1}, ["no longer recompute `Block`"]),
        ({"precision": "bf16"}, {"precision": "fp32"}, ["`x.to(torch.bfloat16)`"]),
        ({"precision": "fp16"}, {"precision": "fp32"}, ["`x.to(torch.float16)`"]),
        ({"precision": "fp32"}, {"precision": "bf16"}, ["float32 again"]),
        ({"precision": "torch_autocast"}, {"precision": "fp32"}, ["`torch.autocast` around the model's forward"]),
        ({"tensor_parallel.autotp_size": 2}, {}, ["num_replicas=world_size // 2, rank=rank // 2", "ds_to_universal"]),
        ({"sequence_parallel_size": 2}, {}, ["sequence_parallel_size=2, micro_batch_size=8", "sp_size=2"]),
        ({"expert_parallel.autoep_size": 2}, {}, ["the JSON shares the experts", "`MoE(..., ep_size=2)`"]),
        ({}, {"tensor_parallel.autotp_size": 2}, ["saved at a tensor degree of 2 is converted first"]),
        ({"zero_stage": 3}, {}, ["save_checkpoint"]),
        ({}, {"zero_stage": 1}, ["engine.backward(loss)"]),
    ],
)  # fmt: skip
def test_a_change_of_the_script_is_said_with_its_code(now, before, said):
    batch = {"micro_batch_size": 8}
    found = changes(batch | now, batch | before)
    assert all(text in found for text in said)


def test_a_script_that_ran_at_stage_0_goes_backward_as_it_should():
    stage_0, stage_1 = Candidate(micro_batch_size=8), Candidate(micro_batch_size=8, zero_stage=1)
    assert script_side_changes(stage_0, stage_1, "Block", is_script=True) == []


def test_a_script_whose_trials_noted_what_carried_the_batch_is_not_told_so_twice():
    before, after = Candidate(micro_batch_size=8), Candidate(micro_batch_size=4)
    assert any("data loader" in text for text in script_side_changes(after, before, "Block"))
    told = script_side_changes(after, before, "Block", is_script=True)
    assert told == []


def test_what_a_framework_does_by_itself_is_not_asked_of_the_user():
    before = Candidate.of({"micro_batch_size": 8, "zero_stage": 1})
    after = Candidate.of({"micro_batch_size": 8, "zero_stage": 3, "precision": "bf16", "checkpoint_every": 1})
    assert script_side_changes(after, before, "Block", is_script=True, family=TRAINER) == [
        "Activation checkpointing: recompute every `Block`: `--gradient_checkpointing`."
    ]
    raw = "\n".join(script_side_changes(after, before, "Block", is_script=True))
    assert "Saving: " in raw and "checkpoint(block, x" in raw
    assert not any(
        "Saving" in text for text in script_side_changes(after, before, "Block", is_script=True, family=ACCELERATE)
    )
    (off,) = script_side_changes(before, after, "Block", is_script=True, family=TRAINER)
    assert off.startswith("Activation checkpointing: off, without `--gradient_checkpointing` (in TRL: ")
