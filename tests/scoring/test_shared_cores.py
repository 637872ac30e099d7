"""What other processes do to step times, by the cores that they leave, and how estimates take it."""

import math
from dataclasses import replace

import pytest
from support.made_up import measured

from autotune.scoring.estimates import estimate
from autotune.scoring.shared_cores import log_slowdown
from autotune.trial.result import Outcome


@pytest.mark.parametrize(
    ("others", "wanted", "n_cores", "factor"),
    [
        (1.1, 2, 2, 2.0),
        (1.1, 1, 2, 1.0),
        (0.6, 2, 2, 4 / 3),
        (4.1, 16, 16, 4 / 3),
        (4.1, 4, 16, 1.0),
        (14.1, 4, 16, 2.0),
        (2.0, 2, 2, 10.0),
        (1.1, 8, 2, 2.0),
        (0.1, 2, 2, 1.0),
        (0.29, 2, 2, 2 / 1.81),  # no step: equal trials beside 0.29 and 0.31 of two cores were told 17 % apart
        (0.31, 2, 2, 2 / 1.79),
    ],
)
def test_steps_take_longer_by_the_cores_that_they_want_over_those_that_are_left(others, wanted, n_cores, factor):
    assert math.exp(log_slowdown(others, wanted, n_cores)) == pytest.approx(factor)


@pytest.mark.parametrize(
    ("waited", "factor"),
    [((), 2.0), ((0.0,), 1.0), ((0.2,), 1.25), ((0.2, 0.2), 1.25**2), ((0.9, 0.9), 2.0), ((1.0,), 2.0), ((1.5,), 2.0)],
)
def test_no_step_takes_longer_for_others_than_its_threads_waited_for_cores(waited, factor):
    assert math.exp(log_slowdown(1.1, 2, 2, waited)) == pytest.approx(factor)


def test_a_baseline_beside_others_is_no_slower_than_a_trial_without():
    """Each of 12 studies of equal candidates on a machine whose load came and went claimed 2.0x where its baseline was read beside it."""
    trials = [
        replace(
            measured(n, 0.1 * (2.0 if n == 0 else 1.0) * (1 + 0.003 * n), zero_stage=n % 4),
            log_slowdown={0: math.log(2) * (n == 0)},
        )
        for n in range(5)
    ]
    found, without = estimate(trials), estimate([replace(m, log_slowdown={}) for m in trials])
    assert not found.told(found.measured[1], "samples_per_s") and without.told(without.measured[1], "samples_per_s")


def test_a_load_that_stays_changes_no_estimate():
    trials = [measured(n, 0.1 + 0.02 * n, rounds=(0.1 + 0.021 * n,), zero_stage=n % 4) for n in range(4)]
    steady = [replace(m, log_slowdown={0: 0.5, 1: 0.5}) for m in trials]
    for one, other in zip(estimate(steady).measured, estimate(trials).measured, strict=True):
        assert one.metrics["step_time_s"] == pytest.approx(other.metrics["step_time_s"], rel=0.01)
    # What a further round may show is doubted as the rounds that were.
    assert estimate(steady).noise_sd > estimate(trials).noise_sd + 0.02


def test_a_trial_whose_load_was_not_counted_gains_nothing_from_those_whose_was():
    """A study that an earlier autotune began went on beside a load that stayed: each further trial read as twice as fast."""
    trials = [measured(n, 0.2 * (1 + 0.003 * n), zero_stage=n % 4) for n in range(5)]
    known = [replace(m, log_slowdown={0: math.log(2)} if m.trial > 1 else {}) for m in trials]
    for one, other in zip(estimate(known).measured, estimate(trials).measured, strict=True):
        assert one.metrics["step_time_s"] == pytest.approx(other.metrics["step_time_s"], rel=0.01)


def test_a_trial_that_was_stopped_early_after_a_pause_reads_as_beside_the_usual_load():
    """No whole trial told of the machine then: beside a load that stayed it read as twice as fast as the others."""
    load = {0: math.log(2)}
    trials = [replace(measured(n, 0.2, zero_stage=n), log_slowdown=load) for n in range(4)]
    stopped = replace(measured(4, 0.3, micro=4), outcome=Outcome.STOPPED_EARLY, sitting=1, log_slowdown=load)
    assert estimate([*trials, stopped]).measured[-1].metrics["step_time_s"] == pytest.approx(0.3, rel=0.01)
