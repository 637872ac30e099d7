"""The description of a `model.py`."""

from dataclasses import asdict

import pytest
import torch
from support.instant import WORKLOAD, spec_of
from support.zoo import ADAMW
from torch import nn

from autotune.study.setup.script import inspect_workload
from autotune.trial import folder
from autotune.trial.result import Outcome
from autotune.trial.workload import Workload
from autotune.worker.model.inspect import with_batch_norm, workload_of

pytestmark = pytest.mark.process

TIED, FROZEN = 50 * 16 + 16 * 16 + 16, 16 * 64 + 64 + 64 * 64 + 64


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            "ok",
            {"n_blocks": 4, "block_class": "Block", "n_samples": 2048, "client_optimizer": True, "by_micro_batch": ""},
        ),
        ("vision", {"n_blocks": 3, "by_micro_batch": "BatchNorm2d"}),
        ("seq2seq", {"n_blocks": 4, "block_class": "TransformerDecoderLayer, TransformerEncoderLayer"}),
        ("tied", {"n_parameters": TIED}),  # the tied tensor once
        ("frozen", {"n_parameters": FROZEN + 65, "n_trainable": 65}),
        ("giant_layer", {"n_parameters": 65_536 * 64 + 64 * 2 + 2}),
        ("no_blocks", {"n_blocks": 0}),
        ("iterable", {"n_samples": None}),
        ("batch_fn", {"n_samples": None}),
    ],
)
def test_blocks_samples_and_parameters_are_counted(zoo, model, expected):
    result = zoo.run(model, mode="inspect", world_size=1)
    assert result.outcome is Outcome.COMPLETE, result.reason
    found = folder.read_record(zoo.folder.workload, Workload)
    assert {name: getattr(found, name) for name in expected} == expected
    assert model != "ok" or 0.9 < found.block_share < 1
    assert any("no repeated block" in caveat for caveat in found.caveats) == (found.n_blocks == 0)


def test_inspection_refuses_a_model_with_nothing_to_train(zoo, write_model):
    target = write_model("""
        import deepspeed, torch
        def model():
            assert not deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"], "a PipelineModule would compile it"
            return torch.nn.Linear(2, 2).requires_grad_(False)
        def batch(n):
            return torch.randn(n, 2), torch.randn(n, 2)
        """)
    result = zoo.run(target, mode="inspect", world_size=1)
    assert (result.outcome, result.reason) == (Outcome.CRASHED, "own_model.py: model() has no trainable parameter")


def test_a_configurations_optimizer_takes_the_place_of_the_targets(zoo):
    """The learning rate followed the batch by the rule of the one that was not used, as SGD's in place of AdamW's."""
    found = inspect_workload(spec_of(base_config=ADAMW), zoo.executor, zoo.next_folder().path, 1)
    assert (found.client_optimizer, found.optimizer, found.learning_rates) == (False, "", ())
    assert found.caveats == ["ok.py: optimizer() gives way to the configuration's `optimizer`"]


def test_embeddings_count_that_are_trained_by_sparse_gradients():
    frozen = nn.Embedding(4, 2, sparse=True).requires_grad_(False)
    some = nn.ModuleList([frozen, nn.Embedding(4, 2), nn.EmbeddingBag(4, 2, sparse=True), nn.Linear(2, 2)])
    assert workload_of(some, [], n_samples=None, client_optimizer=False).sparse == "EmbeddingBag"
    assert workload_of(some[:2], [], n_samples=None, client_optimizer=False).sparse == ""


class Shared(nn.Embedding):
    """Makes a table as it likes, as those do that share it out over ranks."""

    def __init__(self):
        nn.Module.__init__(self)
        self.table = nn.Parameter(torch.zeros(4, 2))


def test_an_embedding_that_is_made_otherwise_is_described():
    assert workload_of(Shared(), [], n_samples=None, client_optimizer=False).sparse == ""


def test_layers_count_that_train_by_the_statistics_of_a_micro_batch_and_no_frozen_ones():
    frozen, always = nn.BatchNorm1d(4).eval(), nn.SyncBatchNorm(4, track_running_stats=False).eval()
    found = with_batch_norm(WORKLOAD, nn.Sequential(nn.BatchNorm1d(4), frozen, always, nn.LayerNorm(4)))
    assert found.by_micro_batch == "BatchNorm1d, SyncBatchNorm" and found.by_micro_batch in found.caveats[-1]
    kept = asdict(found)
    earlier = {"batch_norm" if name == "by_micro_batch" else name: value for name, value in kept.items()}
    assert folder.adapter(Workload).validate_python(earlier).by_micro_batch == found.by_micro_batch, "a study of before"
    assert with_batch_norm(WORKLOAD, nn.Sequential(frozen, nn.InstanceNorm1d(4), nn.GroupNorm(2, 4))) == WORKLOAD
