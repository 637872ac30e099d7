"""Limits that end a script after few steps: trials lift them, and say so."""

from types import SimpleNamespace

import pytest

from autotune.trial.request import TrialRequest
from autotune.worker.script.context import ScriptContext
from autotune.worker.script.frameworks import huggingface, lightning


@pytest.fixture
def context():
    found = ScriptContext.__new__(ScriptContext)
    found.report, found.request = SimpleNamespace(caveats=[]), TrialRequest(target="train.py", world_size=2)
    return found


@pytest.mark.parametrize(
    ("given", "left", "lifted"),
    [
        ({"limit_train_batches": 1, "max_epochs": 1}, {"limit_train_batches": None, "max_epochs": 1}, True),
        ({"max_steps": 1}, {"max_steps": 1000}, True),
        ({"fast_dev_run": True}, {"fast_dev_run": False}, True),
        ({"limit_train_batches": 1.0, "max_steps": -1}, {"limit_train_batches": 1.0, "max_steps": -1}, False),
        ({"limit_train_batches": 6, "accumulate_grad_batches": 2},
         {"limit_train_batches": None, "accumulate_grad_batches": 2}, True),
        ({"max_steps": 5, "fast_dev_run": False}, {"max_steps": 5, "fast_dev_run": False}, False),
    ],
)  # fmt: skip
def test_lightnings_limits(context, given, left, lifted):
    lightning._Adapter(context, "lightning.pytorch")._lift_limits(given)
    assert given == left and bool(context.report.caveats) == lifted


@pytest.mark.parametrize(
    ("n_samples", "epochs", "max_steps", "left"),
    [(1000, 0.01, -1, 16), (1000, 3.0, -1, 3.0), (4, 1.0, -1, 1000), (4, 1.0, 100, 1.0), (None, 0.01, -1, 0.01)],
)
def test_epochs_of_the_trainer_that_have_too_few_steps(context, n_samples, epochs, max_steps, left):
    arguments = SimpleNamespace(
        per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=epochs, max_steps=max_steps
    )
    data = iter(()) if n_samples is None else range(n_samples)
    huggingface._Adapter(context)._lift_epochs(SimpleNamespace(args=arguments, train_dataset=data))
    assert arguments.num_train_epochs == left
    assert [f"num_train_epochs={epochs}" in caveat for caveat in context.report.caveats] == [True] * (left != epochs)
