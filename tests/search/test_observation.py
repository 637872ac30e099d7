"""Trials as the search sees them: what other processes slowed down is compared as beside their usual load."""

import math

import pytest

from autotune.search.observation import Observation, as_usual
from autotune.space.candidate import Candidate
from autotune.trial.result import Outcome


def told(log_slowdown, step_s=0.1, **fields):
    metrics = {"step_time_s": step_s, "samples_per_s": 8 / step_s, "peak_memory_bytes": 1e8}
    ci95 = {"step_time_s": (0.99 * step_s, 1.01 * step_s)}
    given = {"metrics": metrics, "ci95": ci95, "inner_s": 0.4 * step_s, "boundary_s": 0.6 * step_s} | fields
    return Observation(candidate=Candidate(micro_batch_size=8), log_slowdown=log_slowdown, **given)


def test_a_trial_that_others_slowed_down_counts_as_beside_their_usual_load():
    slowed, alone = as_usual([told(math.log(2), 0.2), told(0.0)])
    for one, other in ((slowed, alone), (alone, slowed)):
        assert one.metrics == pytest.approx(other.metrics)
        assert (one.inner_s, one.boundary_s) == pytest.approx((other.inner_s, other.boundary_s))
    assert 0.1 < slowed.metrics["step_time_s"] < 0.2 and slowed.load_sd > alone.load_sd > 0.05


def test_the_doubt_of_a_load_is_no_noise_of_a_trial_s_steps():
    """The noise between trials was expected at four times that of their steps, and so at its most beside a load that stayed."""
    for seen in as_usual([told(0.6), told(0.6)]):
        assert seen.own_noise() == pytest.approx(told(0.6).own_noise()) and seen.load_sd == pytest.approx(0.09)


def test_a_reading_beside_far_more_than_the_usual_load_is_doubted_as_far():
    """Its doubt was cut to what the steps of a trial may differ by."""
    *_, loaded = as_usual([*[told(0.0)] * 9, told(math.log(10), 1.0)])
    assert loaded.load_sd > 1


def test_what_ran_beside_nothing_stays_as_it_was():
    trials = [told(0.0), Observation(candidate=Candidate(micro_batch_size=8), outcome=Outcome.OOM)]
    assert as_usual(trials) == trials and as_usual([]) == []


def test_the_only_trial_beside_others_is_the_usual_one():
    [found] = as_usual([told(0.7)])
    assert found.metrics == pytest.approx(told(0.7).metrics)


def test_a_trial_whose_load_was_not_counted_ran_beside_the_usual_one():
    """As another program told it, or an earlier autotune: beside a load that stays it read as slower than what was corrected for it."""
    uncounted, counted = as_usual([told(None, 0.2), told(math.log(2), 0.2)])
    assert uncounted == told(None, 0.2) and counted.metrics == pytest.approx(uncounted.metrics)
