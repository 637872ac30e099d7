"""Rates on step times and lengths whose truth is known."""

import numpy as np
import pytest

from autotune.scoring import rates
from autotune.scoring.metrics import METRICS
from autotune.scoring.rates import rate_of, total_rate
from autotune.scoring.step_times import measured_enough, summarise
from autotune.trial.result import Outcome, TrialResult

SAMPLES = 8


def lengths(kind, random, n_steps):
    """Padded length of each step's batch."""
    draws = {
        "constant": lambda: np.full((n_steps, SAMPLES), 64.0),
        "log-normal": lambda: 64 * np.exp(0.7 * random.standard_normal((n_steps, SAMPLES))),
        "bimodal": lambda: np.where(random.random((n_steps, SAMPLES)) < 0.1, 512.0, 32.0),
        "rare long": lambda: np.where(random.random((n_steps, SAMPLES)) < 1 / 500, 32 * 32.0, 32.0),
    }
    return draws[kind]().max(axis=1).round()


def times_of(padded, random, sd=0.05):
    """Step times: a fixed part, one for each token, one that grows with the square, and noise of the machine."""
    true = 0.005 + 1e-4 * padded + 2e-8 * padded**2
    return true * np.exp(sd * random.standard_normal(len(padded)))


KINDS = ["constant", "log-normal", "bimodal", "rare long"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_steps", [30, 200])
def test_a_rate_is_the_total_over_the_total(kind, n_steps):
    for seed in range(20):
        random = np.random.default_rng(seed)
        padded = lengths(kind, random, n_steps)
        times = times_of(padded, random)
        found = total_rate(times, [SAMPLES] * n_steps, padded * SAMPLES)
        assert found.value == pytest.approx(SAMPLES * n_steps / times.sum(), rel=0.02)
        tokens = total_rate(times, padded * SAMPLES, padded * SAMPLES)
        assert tokens.value == pytest.approx(padded.sum() * SAMPLES / times.sum(), rel=0.02)


@pytest.mark.parametrize(("kind", "n_steps"), [("constant", 8), ("constant", 60), ("log-normal", 60), ("bimodal", 60)])
def test_intervals_hold_what_a_long_training_shows(kind, n_steps):
    random = np.random.default_rng(7)
    truth = SAMPLES * 20_000 / times_of(lengths(kind, random, 20_000), random).sum()
    held = 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        padded = lengths(kind, random, n_steps)
        found = total_rate(times_of(padded, random), [SAMPLES] * n_steps, padded)
        held += found.low <= truth <= found.high
    assert held >= 180


def test_where_one_step_holds_most_of_the_time_the_interval_says_so():
    sizes = [1] * 40
    times = [0.01] * 40
    sizes[20], times[20] = 32, 1.0
    found = total_rate(times, [8] * 40, sizes)
    assert found.value == pytest.approx(8 * 40 / sum(times)) and found.high > 2 * found.value


def test_what_the_machine_did_to_a_few_steps_is_not_the_data_s():
    times = [0.1, 0.101, 0.099, 0.1] * 10
    times[17] = 4.0
    assert total_rate(times, [8] * 40).value == pytest.approx(80, rel=0.02)
    assert total_rate(times, [8] * 40, [64] * 17 + [2560] + [64] * 22).value == pytest.approx(
        320 / sum(times), rel=0.01
    )


def test_what_happens_to_many_steps_belongs_to_the_training():
    times = [0.1] * 40
    times[::5] = [0.5] * 8
    assert total_rate(times, [8] * 40).value == pytest.approx(320 / sum(times), rel=0.01)


def trial(times, **taken_in):
    return TrialResult(
        outcome=Outcome.COMPLETE, step_times_s=times, steps=summarise(times), samples_per_step=8, taken_in=taken_in
    )


def test_throughput_is_total_over_total_and_latency_the_ordinary_step():
    times = [9.0, 9.0] + [0.1] * 30
    times[12] = 3.0
    elements = [8] * 32
    elements[12] = 256
    result = trial(times, samples=[8], elements=elements, tokens=elements, real_tokens=[n // 2 for n in elements])
    assert METRICS["step_time_s"].of(result, None).value == pytest.approx(0.1)
    assert METRICS["samples_per_s"].of(result, None).value == pytest.approx(30 * 8 / 5.9)
    result.tokens_per_step = 16
    assert METRICS["tokens_per_s"].of(result, None).value == pytest.approx(sum(elements[2:]) / 2 / 5.9)


def test_a_trial_whose_steps_are_not_known_one_by_one_has_no_rate_of_that_kind():
    assert rate_of(trial([1.0] * 10), "samples") is None and total_rate([], []) is None
    assert METRICS["samples_per_s"].of(trial([1.0] * 10), None).value == pytest.approx(8.0)


def test_data_of_any_length_are_measured_longer():
    random = np.random.default_rng(0)
    padded = lengths("log-normal", random, 40)
    taken_in = {"samples": [8] * 40, "elements": [int(n) for n in padded]}
    times = [float(t) for t in 0.1 + 0.001 * padded]
    alike = [0.1 + 1e-4 * (i % 3) for i in range(40)]
    assert measured_enough(alike, {"samples": [8] * 40, "elements": [64] * 40})
    assert not measured_enough(times, taken_in)


def test_a_rate_is_that_of_the_whole_data_set_although_the_trial_saw_other_lengths():
    sizes = [1000.0, 1200.0, 900.0, 1100.0] * 5
    times = [0.1 + size * 1e-3 for size in sizes]
    found = rates.as_expected(times, sizes, 3000.0)
    assert sum(found) / len(found) == pytest.approx(3.1)
    assert rates.as_expected(times, [1000.0] * 20, 3000.0) == times
