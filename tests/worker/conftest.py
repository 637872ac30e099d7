"""What tests of the ranks share: truths that are computed beside them."""

import importlib.util
from typing import Any

import pytest
from support.paths import MODELS


@pytest.fixture(scope="session")
def noise_scale_of_still() -> float:
    """Of `models/still.py`: tr(Sigma) / |G|^2 over the whole data set, one sample at a time."""
    import torch  # only once it is asked for: a worker of the unit tests does without

    spec = importlib.util.spec_from_file_location("still", MODELS / "still.py")
    assert spec is not None and spec.loader is not None
    still = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(still)
    model = still.model()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, Any], x: Any, y: Any) -> Any:
        out = torch.func.functional_call(model, weights, (x[None],))
        return torch.nn.functional.cross_entropy(out, y[None])

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, *still.data().tensors)
    gradients = torch.cat([gradient.flatten(1) for gradient in each.values()], dim=1).double()
    mean = gradients.mean(dim=0)
    return float((gradients - mean).square().sum(dim=1).mean() / mean.square().sum())
