"""The branch check on pairs of runs whose truth is known."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from autotune.scoring.convergence.branch import Run, compare

N, NOISE_SCALE, BASE = 4096, 64.0, 16


def run(batch: int, samples_per_s: float, *, worth: float | None = None, seed: int = 0, finite: bool = True) -> Run:
    """A loss that falls with useful samples, over data whose luck is the same for every batch."""
    n = N // batch
    share = worth if worth is not None else (NOISE_SCALE + BASE) / (NOISE_SCALE + batch)
    useful = share * np.arange(n) * batch
    luck = 0.4 * np.random.default_rng(1).standard_normal(N).reshape(n, batch).mean(axis=1)
    rounding = 2e-3 * np.random.default_rng(seed).standard_normal(n)
    losses = 3.0 - 0.45 * np.log(useful + 400.0) + luck + rounding
    return Run(
        losses=[float(loss) for loss in losses[: None if finite else -1]] + ([] if finite else [None]),
        batch=batch,
        samples_per_s=samples_per_s,
    )


@pytest.mark.parametrize(("batch", "speed"), [(32, 1.4), (64, 1.8), (128, 2.2), (8, 0.8)])
def test_the_time_ratio_is_that_of_efficiency_and_throughput(batch: int, speed: float) -> None:
    truth = (NOISE_SCALE + batch) / (NOISE_SCALE + BASE) / speed
    found = compare(run(batch, speed), run(BASE, 1.0, seed=1), truth, 400.0)
    assert found.low <= truth <= found.high and found.time_ratio == pytest.approx(truth, rel=0.2)
    assert found.confirmed and f"as predicted ({truth:.2f}x)" in found.reason


def test_a_batch_that_is_worth_less_than_predicted_is_refuted() -> None:
    found = compare(run(128, 2.2, worth=0.2), run(BASE, 1.0, seed=1), 0.6, 400.0)
    assert found.confirmed is False and found.low > 1 and ": refuted, since" in found.reason


@pytest.mark.parametrize(("predicted", "how"), [(0.3, "later than"), (0.9, "sooner than")])
def test_a_batch_that_stands_is_said_to_be_as_predicted_only_where_it_is(predicted: float, how: str) -> None:
    found = compare(run(64, 2.0), run(BASE, 1.0, seed=1), predicted, 400.0)
    assert found.confirmed and f"{how} predicted ({predicted:.2f}x)" in found.reason


@pytest.mark.parametrize(
    ("batch", "worth", "said"), [(64, 3.0, True), (64, 1.0, False), (64, 0.5, False), (8, 3.0, False)]
)
def test_fewer_samples_for_a_larger_batch_are_laid_to_its_learning_rate(batch: int, worth: float, said: bool) -> None:
    found = compare(run(batch, 2.0, worth=worth), run(BASE, 1.0, seed=1, worth=1.0), 0.6, 400.0)
    assert ("another learning rate may do so" in found.reason) is said


def test_the_same_batch_at_the_same_speed_takes_the_same_time() -> None:
    found = compare(run(BASE, 1.0), run(BASE, 1.0, seed=1))
    assert found.confirmed and found.time_ratio == pytest.approx(1, abs=0.05)


def test_a_loss_that_hardly_falls_decides_nothing() -> None:
    flat = Run(losses=[2.0 + 0.1 * math.sin(7 * i) for i in range(64)], batch=16, samples_per_s=1.0)
    found = compare(flat, flat)
    assert found.confirmed is None and "or --branch-tokens" in found.reason


def test_too_few_samples_for_a_batch_decide_nothing_and_nan_refutes() -> None:
    few, broken = compare(run(1024, 3.0), run(BASE, 1.0)), compare(run(32, 3.0, finite=False), run(BASE, 1.0))
    assert few.confirmed is None and broken.confirmed is False
    for found in (few, broken):
        json.dumps(vars(found), allow_nan=False)  # it is kept as a file
