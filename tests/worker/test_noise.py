"""The gradient noise that ranks measure, beside a brute-force computation from the same weights."""

from __future__ import annotations

import importlib.util

import pytest
from zoo import MODELS, Zoo

from autotune.convergence import noise_scale
from autotune.trial import Outcome

MICRO, STEPS = 64, 40
CELLS = [(2, 2, "fp32", 0), (2, 2, "fp32", 3), (2, 2, "bf16", 0), (2, 2, "bf16", 2), (2, 2, "torch_autocast", 1), (1, 4, "fp32", 1)]


@pytest.fixture(scope="module")
def truth() -> float:
    """tr(Sigma) / |G|^2 over the whole data set, one sample at a time."""
    torch = pytest.importorskip("torch")
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


@pytest.mark.parametrize(("ranks", "steps", "precision", "stage"), CELLS)
def test_the_noise_scale_is_that_of_brute_force(zoo: Zoo, truth: float, ranks: int, steps: int, precision: str, stage: int) -> None:
    result = zoo.run(
        "still", micro=MICRO, gradient_accumulation_steps=steps, precision=precision, zero_stage=stage,
        world_size=ranks, noise=True, max_steps=STEPS, min_samples=10**9, budget_s=60.0,
    )  # fmt: skip
    assert result.outcome is Outcome.COMPLETE, result.reason
    terms = result.noise
    assert terms is not None and len(terms.micro_sq) == len(terms.mean_sq) == STEPS
    assert (terms.micro_batch_size, terms.n_micro) == (MICRO, ranks * steps)
    found = noise_scale(terms.micro_sq, terms.mean_sq, micro_batch_size=terms.micro_batch_size, n_micro=terms.n_micro)
    assert found.resolved and found.low <= truth * 1.05 and truth * 0.95 <= found.high
    assert found.samples == pytest.approx(truth, rel=0.15)


def test_without_being_asked_nothing_is_hooked(zoo: Zoo) -> None:
    assert zoo.run("still", max_steps=4, budget_s=0.0).noise is None
