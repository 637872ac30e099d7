"""Compares the noise scale that ranks measure with brute force, at every stage, two precisions, one and two ranks.

`python benchmarks/noise_scale.py`: on a small model whose weights stand still, the ratio of the measured noise scale to
the one computed from every sample's own gradient.
"""

from __future__ import annotations

import importlib.util
import itertools
import statistics

import torch
from common import ROOT, engine, request_of, write

from autotune.executors import base
from autotune.scoring.convergence.noise_scale import noise_scale_of
from autotune.space.candidate import Candidate

TARGET = ROOT / "tests" / "models" / "still.py"
MICRO, STEPS = 512, 120


def brute_force() -> float:
    spec = importlib.util.spec_from_file_location("still", TARGET)
    still = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(still)
    model = still.model()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights, x, y):
        return torch.nn.functional.cross_entropy(torch.func.functional_call(model, weights, (x[None],)), y[None])

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, *still.data().tensors)
    gradients = torch.cat([gradient.flatten(1) for gradient in each.values()], dim=1).double()
    mean = gradients.mean(dim=0)
    return float((gradients - mean).square().sum(dim=1).mean() / mean.square().sum())


def main() -> None:
    truth, ratios = brute_force(), {}
    with engine("torch") as (executor, folder):
        for ranks, precision, stage in itertools.product((1, 2), ("fp32", "bf16"), range(4)):
            knobs = {"micro_batch_size": MICRO, "gradient_accumulation_steps": 4 // ranks, "precision": precision}
            candidate = Candidate.of({**knobs, "zero_stage": stage})
            request = request_of(
                TARGET, candidate, world_size=ranks, noise=True, max_steps=STEPS, min_samples=10**12, budget_s=120.0
            )
            result = base.run(executor, folder / f"{ranks}-{precision}-{stage}", request)
            assert result.noise is not None, result.reason
            ratios[f"{ranks} ranks, {precision}, ZeRO {stage}"] = noise_scale_of(result.noise).samples / truth
    median = statistics.median(ratios.values())
    write("noise_scale", {"brute_force_samples": truth, "ratio": ratios, "median_ratio": median})


if __name__ == "__main__":
    main()
