"""The gradient of the optimizer compared with the micro-gradients; and replicates of a run."""

import pytest
from support.zoo import STEPS

from autotune.scoring.convergence.quality_gate import WORST_ERROR, judge_gradient
from autotune.trial.result import Outcome

pytestmark = pytest.mark.process


def first(zoo, steps, precision, stage, **knobs):
    result = zoo.run(
        "ok", micro=2, gradient_accumulation_steps=steps, precision=precision, zero_stage=stage, check_gradient=True,
        **{**STEPS, "max_steps": 2}, **knobs,
    )  # fmt: skip
    assert result.outcome is Outcome.COMPLETE, result.reason
    return result


@pytest.mark.cells(4)
@pytest.mark.parametrize(
    ("steps", "precision", "stage", "knobs"),
    [
        (4, "fp32", 1, {}),
        (4, "torch_autocast", 0, {}),
        (1, "bf16", 2, {}),
        (4, "fp32", 2, {"communication_data_type": "bf16"}),
        *((4, "fp32", stage, {}) for stage in (3, 0, 2)),
        (1, "bf16", 0, {}),
        *((64, "bf16", stage, {"data_types.grad_accum_dtype": "fp32"}) for stage in (1, 3)),
    ],
)
def test_a_clean_gradient_is_the_mean_of_the_micro_gradients(zoo, steps, precision, stage, knobs):
    found = first(zoo, steps, precision, stage, **knobs).gradient
    assert found is not None and found.n_micro == 2 * steps
    assert found.error <= (1e-6 if precision != "bf16" and not knobs else 0.6 * WORST_ERROR)


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.system) for stage in (1, 2, 3))])
def test_a_gradient_that_step_alone_completes_is_looked_at_within_it(zoo, stage):
    """No backward pass is at a boundary there: the gradient was not seen, and its hooks stayed in the steps that are timed."""
    found = first(zoo, 1, "fp32", stage, managed_gradient_accumulation=False).gradient
    assert found is not None and (found.n_micro, found.error) == (2, pytest.approx(0, abs=1e-6))


@pytest.mark.parametrize("stage", [1, *(pytest.param(stage, marks=pytest.mark.system) for stage in (0, 2, 3))])
def test_what_bf16_loses_over_64_micro_steps_is_caught(zoo, stage):
    found = first(zoo, 64, "bf16", stage).gradient
    assert "the sum of 128 micro-gradients is off" in judge_gradient(found, found, {})


def test_looking_changes_nothing(zoo):
    looked, plain = (
        zoo.run("ok", zero_stage=2, gradient_accumulation_steps=2, check_gradient=check, **STEPS)
        for check in (True, False)
    )
    assert looked.losses == plain.losses and plain.gradient is None


@pytest.mark.system
def test_a_replicate_differs_by_rounding_and_trains_alike(zoo):
    base, same, one, two = (zoo.run("ok", replicate=replicate, **STEPS).losses for replicate in (0, 0, 1, 2))
    assert base == same and one != base != two and one != two
    assert one == pytest.approx(base, rel=5e-3) and two == pytest.approx(base, rel=5e-3)
