"""Models whose layers are split over ranks: they train as whole ones do, and what is split wrongly is refused."""

import pytest
import torch
from support.paths import MODELS
from support.zoo import CLEAN, Zoo
from torch import nn

from autotune.trial.request import TailCheck
from autotune.trial.result import Outcome
from autotune.worker.measure.ledger import NotApplied
from autotune.worker.model import model_file, split
from autotune.worker.model.sequence import IGNORED, check, shard

pytestmark = pytest.mark.process

TENSOR, SEQUENCE, STAGES = "tensor_parallel.autotp_size", "sequence_parallel_size", "pipeline.stages"
EXPERTS = "expert_parallel.autoep_size"
LEAVES = "zero_optimization.leaf_module.classes"
LONG = {"max_steps": 10, "min_samples": 10**9, "budget_s": 60.0}


@pytest.fixture(scope="module")
def whole(executor, tmp_path_factory):
    return Zoo(executor, tmp_path_factory.mktemp("whole")).run("hf", zero_stage=1, **LONG)


def test_a_model_that_is_split_over_two_ranks_trains_as_the_whole_one(zoo, whole):
    parted = zoo.run("hf", micro=8, zero_stage=1, changed_from={TENSOR: None}, **{TENSOR: 2}, **LONG)
    assert whole.outcome is parted.outcome is Outcome.COMPLETE, parted.reason
    assert parted.losses == pytest.approx(whole.losses, abs=1e-3) and len(parted.losses) >= 10
    assert parted.samples_per_step == whole.samples_per_step == 8
    groups, before = parted.observed.groups, whole.observed.groups
    assert (groups.tensor, groups.data, before.tensor, before.data) == (2, 1, 1, 2)
    assert groups.split_modules > 20 and groups.held_parameters < 0.7 * before.held_parameters


def test_sequences_that_are_split_over_two_ranks_train_as_whole_ones(zoo, whole):
    parted = zoo.run("hf", micro=8, zero_stage=2, changed_from={SEQUENCE: None}, **{SEQUENCE: 2}, **LONG)
    assert parted.outcome is Outcome.COMPLETE, parted.reason
    assert parted.losses == pytest.approx(whole.losses, abs=1e-3) and len(parted.losses) >= 10
    assert parted.observed.tokens_per_step == whole.observed.tokens_per_step == 8 * 32
    assert (parted.observed.groups.sequence, parted.observed.groups.data) == (2, 1)


@pytest.mark.parametrize("degree", [TENSOR, SEQUENCE])
def test_a_split_is_compared_with_the_whole_model(zoo, degree):
    assert zoo.run("hf", mode="split", zero_stage=1, **{degree: 2}).outcome is Outcome.COMPLETE


def test_a_pipeline_in_two_stages_trains_as_one_with_all_layers(zoo):
    whole = zoo.run("staged", zero_stage=1, **LONG)
    in_two = {"micro": 4, "gradient_accumulation_steps": 2, "zero_stage": 1, STAGES: 2}
    more = TailCheck(evaluate=True, save=True)
    parted = zoo.run("staged", changed_from={STAGES: None}, tail=more, **in_two, **LONG)
    assert whole.outcome is parted.outcome is Outcome.COMPLETE, whole.reason or parted.reason
    assert parted.losses == pytest.approx(whole.losses, abs=1e-3) and len(parted.losses) >= 10
    assert parted.samples_per_step == whole.samples_per_step == 8
    groups, before = parted.observed.groups, whole.observed.groups
    assert (groups.pipeline, groups.data, before.pipeline, before.data) == (2, 1, 1, 2)
    assert groups.held_parameters < 0.7 * before.held_parameters
    assert {"evaluate", "save"} <= parted.memory_by_phase_bytes.keys(), "neither was tried"


def test_experts_that_are_shared_out_over_two_ranks_train_as_in_every_rank(zoo):
    whole = zoo.run("experts", zero_stage=1, **CLEAN)
    shared = zoo.run("experts", zero_stage=1, changed_from={EXPERTS: None}, **{EXPERTS: 2}, **CLEAN)
    assert whole.outcome is shared.outcome is Outcome.COMPLETE, whole.reason or shared.reason
    groups, before = shared.observed.groups, whole.observed.groups
    assert (groups.expert, groups.data) == (2, 2) and groups.exchanges > 0
    assert (before.expert, before.exchanges) == (1, 0)
    assert groups.held_parameters < 0.7 * before.held_parameters
    assert zoo.run("experts", mode="split", zero_stage=1, **{EXPERTS: 2}).outcome is Outcome.COMPLETE


def test_stages_are_compared_with_one_that_has_all_layers(zoo):
    assert zoo.run("staged", mode="split", micro=2, zero_stage=1, **{STAGES: 2}).outcome is Outcome.COMPLETE


@pytest.mark.system
def test_modules_that_zero_3_gathers_at_once_are_witnessed(zoo):
    three = {"zero_stage": 3, "changed_from": {LEAVES: None}}
    leaves = zoo.run("hf", **three, **{LEAVES: "LlamaDecoderLayer"})
    assert leaves.outcome is Outcome.COMPLETE and not leaves.observed.unwitnessed, leaves.reason
    none = zoo.run("hf", **three, **{LEAVES: "GPT2Block"})
    assert none.outcome is Outcome.NOT_APPLIED and "the model has 0 of class GPT2Block" in none.reason


@pytest.mark.parametrize(("found", "passes"), [(4.6171, True), (4.63, False), (float("nan"), False)])
def test_a_split_model_that_computes_something_else_is_not_applied(found, passes):
    if passes:
        split._compare("loss", found, 4.6170, split.MOST_LOSS_ERROR)
        return
    with pytest.raises(NotApplied, match=r"the split model's loss is .* the whole model's 4.617: it is split wrongly"):
        split._compare("loss", found, 4.6170, split.MOST_LOSS_ERROR)


def test_layers_that_deepspeed_cannot_pair_are_named():
    target = model_file.load(MODELS / "ok.py")
    found = split.splitting(target, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert "finds no pairs of layers to split in Sequential" in found.tensor and found.heads == 0
    assert "this is a Sequential" in found.sequence


def test_the_model_draws_no_dropout_while_it_is_compared(monkeypatch):
    monkeypatch.setattr(nn.functional, "dropout", nn.functional.dropout)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", nn.functional.scaled_dot_product_attention)
    split._without_dropout()
    ones = torch.ones(1, 1, 4, 4)
    assert torch.equal(nn.Dropout(0.5)(ones), ones)
    attend = nn.functional.scaled_dot_product_attention
    assert torch.equal(attend(ones, ones, ones, dropout_p=0.9), ones)
    assert torch.equal(attend(ones, ones, ones, None, 0.9, True), ones)  # as torch's own MultiheadAttention calls it


def test_the_shares_of_a_sequence_are_cut_after_the_labels_were_shifted():
    tokens = torch.arange(10).reshape(2, 5)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    first, last = (shard({"input_ids": tokens, "labels": tokens, "attention_mask": mask}, rank, 2) for rank in (0, 1))
    assert first["input_ids"].tolist() == [[0, 1, 2], [5, 6, 7]] and first["labels"].tolist() == [[1, 2, 3], [6, 7, 8]]
    assert last["input_ids"].tolist() == [[3, 4, 0], [8, 9, 0]]
    assert last["labels"].tolist() == [[4, IGNORED, IGNORED], [9, IGNORED, IGNORED]]
    assert last["position_ids"].tolist() == [[3, 4, 5]] * 2 and last["attention_mask"].tolist() == [
        [1, 1, 0],
        [0, 0, 0],
    ]
    with pytest.raises(model_file.WorkloadError, match="padded on the left"):
        check({"input_ids": tokens, "labels": tokens, "attention_mask": mask.flip(1)})


@pytest.mark.system
def test_a_batch_is_cut_on_its_device_without_waiting_for_it():
    """On `meta`, as on a device, nothing can be read at once."""
    tokens = torch.ones(2, 5, dtype=torch.int64, device="meta")
    own = shard({"input_ids": tokens, "labels": tokens, "attention_mask": tokens}, 1, 2)
    assert {value.device.type for value in own.values()} == {"meta"}
