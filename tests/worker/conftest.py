"""Fixtures for tests of ranks: trials that several tests look at, and a noise scale by brute force."""

import functools
import importlib.util

import pytest
from support.paths import MODELS
from support.zoo import STEPS, Zoo


@pytest.fixture(scope="session")
def noise_scale_of_still():
    """Of `models/still.py`: tr(Sigma) / |G|^2 over the whole data set."""
    import torch  # only once it is asked for: a worker of the unit tests does without

    spec = importlib.util.spec_from_file_location("still", MODELS / "still.py")
    assert spec is not None and spec.loader is not None
    still = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(still)
    model, (inputs, labels) = still.model().double(), still.data().tensors
    of_each, out = 0.0, inputs.double()
    layers = []
    for layer in model:
        layers.append((layer, out))
        out = layer(out)
        out.retain_grad()
        layers[-1] += (out,)
    torch.nn.functional.cross_entropy(out, labels, reduction="sum").backward()
    for layer, into, out in layers:
        if isinstance(layer, torch.nn.Linear):
            # A sample's gradient is the outer product of its output's gradient and its input, with a 1 for the bias.
            of_each += (out.grad.square().sum(dim=1) * (1 + into.square().sum(dim=1))).mean().item()
    of_mean = sum((weight.grad / len(labels)).square().sum().item() for weight in model.parameters())
    return (of_each - of_mean) / of_mean


@pytest.fixture(scope="module")
def measured(executor, tmp_path_factory):
    """Runs a trial of six steps; each configuration once for all tests of a module."""
    zoo = Zoo(executor, tmp_path_factory.mktemp("cells"))

    @functools.cache
    def run(model, **what):
        return zoo.run(model, **{**STEPS, **what})

    return run
