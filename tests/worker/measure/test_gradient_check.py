"""The gradient that the optimizer gets, beside the micro-gradients; and what a replicate of a run is."""

from __future__ import annotations

import pytest
from support.zoo import Zoo

from autotune.scoring.convergence.quality_gate import WORST_ERROR, judge_gradient
from autotune.trial.result import Outcome, TrialResult

pytestmark = pytest.mark.process

EXACT = {"data_types.grad_accum_dtype": "fp32"}


def first(zoo: Zoo, steps: int, precision: str, stage: int, **knobs) -> TrialResult:
    result = zoo.run(
        "ok", micro=2, gradient_accumulation_steps=steps, precision=precision, zero_stage=stage, check_gradient=True, max_steps=3,
        min_samples=10**9, budget_s=60.0, **knobs,
    )  # fmt: skip
    assert result.outcome is Outcome.COMPLETE, result.reason
    return result


@pytest.mark.parametrize(
    ("steps", "precision", "stage", "knobs"),
    [(4, "fp32", 0, {}), (4, "fp32", 1, {}), (4, "fp32", 2, {}), (4, "fp32", 3, {}), (4, "torch_autocast", 0, {}), (1, "bf16", 0, {}),
     (1, "bf16", 2, {}), (64, "bf16", 1, EXACT), (64, "bf16", 3, EXACT), (4, "fp32", 2, {"communication_data_type": "bf16"})],
)  # fmt: skip
def test_a_clean_gradient_is_the_mean_of_the_micro_gradients(
    zoo: Zoo, steps: int, precision: str, stage: int, knobs: dict
) -> None:
    found = first(zoo, steps, precision, stage, **knobs).gradient
    assert found is not None and found.n_micro == 2 * steps
    assert found.error <= (1e-6 if precision != "bf16" and not knobs else 0.6 * WORST_ERROR)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_bf16_loses_over_64_micro_steps_is_caught(zoo: Zoo, stage: int) -> None:
    found = first(zoo, 64, "bf16", stage).gradient
    assert "the sum of 128 micro-gradients is off" in judge_gradient(found, found, {})


def test_looking_changes_nothing(zoo: Zoo) -> None:
    looked, plain = (
        zoo.run(
            "ok",
            zero_stage=2,
            gradient_accumulation_steps=2,
            check_gradient=check,
            max_steps=8,
            min_samples=10**9,
            budget_s=60.0,
        )
        for check in (True, False)
    )
    assert looked.losses == plain.losses and plain.gradient is None


def test_a_replicate_differs_by_rounding_and_trains_alike(zoo: Zoo) -> None:
    base, same, one, two = (
        zoo.run("ok", replicate=replicate, max_steps=8, min_samples=10**9, budget_s=60.0).losses
        for replicate in (0, 0, 1, 2)
    )
    assert base == same and one != base != two and one != two
    assert one == pytest.approx(base, rel=5e-3) and two == pytest.approx(base, rel=5e-3)
