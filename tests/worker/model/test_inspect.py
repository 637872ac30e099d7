"""The description of a `model.py`."""

import pytest

from autotune.trial import folder
from autotune.trial.result import Outcome
from autotune.trial.workload import Workload

pytestmark = pytest.mark.process

TIED, FROZEN = 50 * 16 + 16 * 16 + 16, 16 * 64 + 64 + 64 * 64 + 64


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("ok", {"n_blocks": 4, "block_class": "Block", "n_samples": 2048, "client_optimizer": True}),
        ("vision", {"n_blocks": 3}),
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
        import torch
        def model():
            return torch.nn.Linear(2, 2).requires_grad_(False)
        def batch(n):
            return torch.randn(n, 2), torch.randn(n, 2)
        """)
    result = zoo.run(target, mode="inspect", world_size=1)
    assert (result.outcome, result.reason) == (Outcome.CRASHED, "own_model.py: model() has no trainable parameter")
