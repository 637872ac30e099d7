"""Fixtures for tests of ranks: trials that several tests look at, and a noise scale by brute force."""

import functools
import importlib.util

import pytest
from support.paths import MODELS
from support.zoo import STEPS, Zoo


@pytest.fixture(scope="session")
def noise_scale_of_still():
    """Of `models/still.py`: tr(Sigma) / |G|^2 over the whole data set, one sample at a time."""
    import torch  # only once it is asked for: a worker of the unit tests does without

    spec = importlib.util.spec_from_file_location("still", MODELS / "still.py")
    assert spec is not None and spec.loader is not None
    still = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(still)
    model = still.model()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights, x, y):
        out = torch.func.functional_call(model, weights, (x[None],))
        return torch.nn.functional.cross_entropy(out, y[None])

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, *still.data().tensors)
    gradients = torch.cat([gradient.flatten(1) for gradient in each.values()], dim=1).double()
    mean = gradients.mean(dim=0)
    return float((gradients - mean).square().sum(dim=1).mean() / mean.square().sum())


@pytest.fixture(scope="module")
def measured(executor, tmp_path_factory):
    """Runs a trial of six steps; each configuration once for all tests of a module."""
    zoo = Zoo(executor, tmp_path_factory.mktemp("cells"))

    @functools.cache
    def run(model, **what):
        return zoo.run(model, **{**STEPS, **what})

    return run
