"""Samples to the target, pooled over trials."""

from dataclasses import replace

import numpy as np
import pytest
from support.made_up import CONVERGENCE, measured

from autotune.scoring.estimates import estimate
from autotune.scoring.samples import _Kinds, pooled

pytestmark = pytest.mark.unit


def curve(log_batch):
    return np.log(1e6 * (1 + np.exp(log_batch) / 128))


def test_the_noise_of_single_loss_curves_is_averaged_over_all_trials():
    rng = np.random.default_rng(0)
    log_batch = np.log(2.0) * rng.integers(2, 9, 30)
    read = curve(log_batch) + rng.normal(0, 0.05, 30)
    mean, sd, _ = pooled(read, log_batch, ["bf16"] * 30, np.zeros(30), np.zeros(30))
    off, own = (np.std(values - curve(log_batch)) for values in (mean, read))
    assert off < 0.5 * own
    assert np.mean(np.abs(mean - curve(log_batch)) < 2 * sd) > 0.85


def test_other_numerics_that_train_worse_are_not_averaged_away():
    rng = np.random.default_rng(1)
    log_batch, numerics = np.full(20, np.log(32.0)), ["fp32", "bf16"] * 10
    worse = np.tile([0.0, 0.3], 10)
    mean = pooled(
        curve(log_batch) + worse + rng.normal(0, 0.03, 20), log_batch, numerics, np.zeros(20), np.zeros(20)
    ).mean
    assert mean[1] - mean[0] == pytest.approx(0.3, abs=0.06)


def test_an_extrapolated_reading_bounds_the_estimate_from_below():
    """Twice the batch that trained to 2.6 times the samples without the target was said to need hardly more than the baseline."""
    log_batch, read = np.log([8.0, 16.0]), np.log([100.0, 260.0])
    found = pooled(read, log_batch, ["fp32"] * 2, np.array([0.02, 0.02]), np.array([0.02, 1.0]))
    assert found.mean[1] > np.log(200.0)
    assert found.above[1] > 1.5 * found.below[1]


def test_trials_of_one_batch_are_one_kind_although_each_reads_it_from_a_clock():
    """Of 1,000 trials with five batches each was a kind of its own: four seconds for each estimate."""
    rng = np.random.default_rng(2)
    log_batch = np.log(2.0) * rng.integers(2, 7, 1000) + rng.normal(0, 0.002, 1000)
    assert len(_Kinds.of(log_batch, ["bf16"] * 1000).prior) <= 15


def test_a_lucky_loss_curve_does_not_make_a_trial_the_best():
    trials = [with_time_to_loss(n, lucky) for n, lucky in enumerate([1.0, 1.04, 0.93, 0.97, 0.85, 1.05, 1.02, 0.96])]
    found = estimate(trials)
    lucky = found.gain(found.measured[4], found.measured[1], CONVERGENCE.metric)
    assert lucky is not None and not lucky.told
    assert lucky.factor == pytest.approx(1.0, abs=0.05)
    assert found.raw[4].metrics[CONVERGENCE.metric] == trials[4].metrics[CONVERGENCE.metric]


def with_time_to_loss(number, factor):
    """A trial of one batch with others' step time, whose loss curve read that factor."""
    trial = measured(number)
    return replace(trial, metrics={**trial.metrics, CONVERGENCE.metric: 100.0 * factor})
