"""The calibrated model: intervals that hold whatever the scales are, and typical scales for the best of many."""

from dataclasses import replace

import numpy as np
import pytest

from autotune.forecast.regression import OWN_SD, Data, Design, fit
from autotune.scoring.quantiles import Z90

LEVELS = 4


def design(n, rng):
    """Candidates of four knobs with two values each and one size."""
    levels, size = rng.integers(0, 2, (n, LEVELS)).astype(float), rng.uniform(-2, 2, n)
    linear = np.column_stack([np.ones(n), size, levels])
    smooth = np.column_stack([size * 0.4, levels * 0.6])
    return Design(terms=np.ones((n, 1)), linear=linear, smooth=smooth, levels=levels)


def learned(rng, n):
    """A model of `n` trials whose truth has small effects of levels, with 2 % noise."""
    seen = design(n, rng)
    y = seen.linear @ np.array([1.0, 0.1, 0.05, -0.05, 0.02, 0.0]) + rng.normal(0, 0.02, n)
    sd = np.array([2.0, 0.15, *[0.3] * LEVELS])
    return fit(Data.of(seen, y), sd, np.zeros(1), 0.03), seen


def test_typical_scales_are_narrower_than_those_that_an_interval_needs():
    rng = np.random.default_rng(1)
    model, seen = learned(rng, 10)
    typical, unseen = model.typical(), design(200, rng)
    (mean, sd), (typical_mean, typical_sd) = model.predict(unseen), typical.predict(unseen)
    assert typical_sd.mean() < 0.9 * sd.mean() and np.abs(typical_mean - mean).max() < 2 * sd.max()
    drawn = typical.draw(unseen, rng, 2000)
    assert drawn.std(axis=0) == pytest.approx(typical_sd, rel=0.15)
    assert model.predict(unseen)[1] == pytest.approx(sd) and model.predict(seen)[1].mean() < sd.mean()


def test_what_a_candidate_has_of_its_own_is_only_known_where_it_was_measured():
    rng = np.random.default_rng(2)
    model, seen = learned(rng, 40)
    typical = model.typical()
    close = replace(seen, smooth=seen.smooth + 1e-3)
    at, beside = typical.predict(seen)[1], typical.predict(close)[1]
    assert (beside > at).all() and beside.min() > OWN_SD
    assert model.predict(close)[1] == pytest.approx(model.predict(seen)[1], rel=0.01)


def test_what_is_foretold_of_all_trials_and_what_they_read_make_what_is_believed_of_them():
    rng = np.random.default_rng(3)
    seen = design(12, rng)
    data = Data(
        design=seen, y=seen.linear @ np.array([1.0, 0.1, 0.05, -0.05, 0.02, 0.0]) + rng.normal(0, 0.02, 12),
        group=np.repeat(np.arange(6), 2), extra_sd=np.tile([0.0, 0.03], 6), censored=np.zeros(12, dtype=bool),
    )  # fmt: skip
    model = fit(data, np.array([2.0, 0.15, *[0.3] * LEVELS]), np.zeros(1), 0.03).typical()
    groups, mean, covariance = model.joint()
    gain = covariance @ np.linalg.inv(covariance + model.noise_sd**2 * np.eye(6))
    assert list(groups) == list(range(6)) and np.abs(data.y[::2] - mean).max() > 0.05
    assert mean + gain @ (data.y[::2] - mean) == pytest.approx(
        model.predict(seen.take(np.arange(0, 12, 2)))[0], abs=0.003
    )


def test_before_any_observation_there_is_but_one_scale():
    model = fit(None, np.ones(2), np.zeros(1))
    assert model.typical() is model and not len(model.joint()[0])


def of_knobs(n, rng):
    """Candidates of six knobs with three values each."""
    levels = np.eye(3)[rng.integers(0, 3, (n, 6))].reshape(n, 18)
    linear, one = np.column_stack([np.ones(n), levels]), np.ones((n, 1))
    return Design(terms=one, linear=linear, smooth=levels * 0.6, levels=levels)


@pytest.mark.parametrize("seed", range(3))
def test_what_settings_do_together_is_not_taken_for_noise(seed):
    rng = np.random.default_rng(seed)
    every = of_knobs(400, rng)
    together = np.triu(rng.normal(0, 0.12, (18, 18)), 1)
    truth = 1.0 + np.einsum("ij,jk,ik->i", every.levels, together, every.levels)
    seen, unseen = np.arange(60), np.arange(60, 400)
    data = Data.of(every.take(seen), truth[seen] + rng.normal(0, 0.02, 60))
    model = fit(data, np.array([2.0, *[0.3] * 18]), np.zeros(1), 0.03)
    mean, sd = model.predict(every.take(unseen))
    assert model.noise_sd < 0.1 and np.mean(np.abs(truth[unseen] - mean) < Z90 * sd) > 0.85


def test_where_settings_do_nothing_together_nothing_is_learned_of_pairs():
    rng = np.random.default_rng(1)
    seen = of_knobs(30, rng)
    y = 1.0 + seen.levels @ rng.normal(0, 0.06, 18) + rng.normal(0, 0.02, 30)
    model = fit(Data.of(seen, y), np.array([2.0, *[0.3] * 18]), np.zeros(1), 0.03)
    assert model.pair_sd < 0.03 and model.noise_sd < 0.06
