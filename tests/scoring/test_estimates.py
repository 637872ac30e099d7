"""One estimate for each figure, from all measurements of a study."""

import math
from dataclasses import replace

import pytest
from support.made_up import measured

from autotune.scoring.estimates import STEP, TO_TARGET, estimate
from autotune.scoring.metrics import measure
from autotune.scoring.step_times import summarise
from autotune.trial.result import Outcome, TrialResult


def with_rate(m, factor, low=0.7, high=1.3):
    """A trial of which a few long steps made the first rate another one than its median step says."""
    rate = factor * m.metrics["samples_per_s"]
    return replace(
        m, metrics={**m.metrics, "samples_per_s": rate}, ci95={**m.ci95, "samples_per_s": (low * rate, high * rate)}
    )


def throughputs(*trials):
    found = estimate(trials)
    return found, {m.trial: m.metrics["samples_per_s"] for m in found.measured}


def test_long_steps_in_the_first_reading_of_the_baseline_alone_are_no_gain_for_others():
    baseline = with_rate(measured(0, 0.1, rounds=[0.1, 0.1]), 0.8)
    found, rates = throughputs(baseline, measured(1, 0.1, rounds=[0.1, 0.1]), measured(2, 0.102), measured(3, 0.098))
    assert rates[0] == pytest.approx(80, rel=0.02) and rates[1] == pytest.approx(80, rel=0.02)
    gain = found.gain(found.measured[1], found.measured[0], "samples_per_s")
    assert gain.factor == pytest.approx(1.0, abs=0.02) and not gain.told and gain.high / gain.low < 1.2


def test_what_a_trial_loses_to_long_steps_in_every_reading_stays_its_own():
    """As where batches of a script differ in length."""
    uneven = with_rate(measured(1, 0.1), 0.8, low=0.99, high=1.01)
    again = {n: {**uneven.metrics} for n in (1, 2)}
    _, rates = throughputs(measured(0, 0.1, rounds=[0.1, 0.1]), replace(uneven, repeats=again), measured(2, 0.1))
    assert rates[1] == pytest.approx(64, rel=0.02) and rates[2] == pytest.approx(80, rel=0.02)


@pytest.mark.parametrize("rate_half", [0.02, 0.1])
def test_a_rate_that_other_trials_settle_leaves_open_what_the_loss_curves_do(rate_half):
    """The width of an unsteady rate was taken off that of the loss curve, which then was known exactly."""

    def with_curve(m, half=0.2):
        ends = 100 * math.exp(-math.hypot(half, rate_half)), 100 * math.exp(math.hypot(half, rate_half))
        return replace(m, metrics={**m.metrics, TO_TARGET: 100.0}, ci95={**m.ci95, TO_TARGET: ends})

    wide = [with_rate(measured(n), 1.0, math.exp(-rate_half), math.exp(rate_half)) for n in range(3)]
    found = estimate([with_curve(m) for m in wide])
    (low, high), timed = found.measured[0].ci95[TO_TARGET], found.measured[0].ci95["samples_per_s"]
    curve = math.log(high / low) ** 2 - math.log(timed[1] / timed[0]) ** 2
    assert math.sqrt(max(0.0, curve)) / 2 == pytest.approx(0.12, abs=0.03)


def test_a_trial_with_a_step_that_took_long_is_known_less_well_the_longer_that_took():
    """Beyond three times the others its interval reached zero, and the trial counted as one that was read exactly."""

    def gain(worst):
        times = [0.8, 0.8, 0.8, 0.81, 0.79, 0.8 * worst]
        own = measure(TrialResult(outcome=Outcome.COMPLETE, step_times_s=times, steps=summarise(times)), None)[STEP]
        quick = replace(measured(1, own.value), ci95={STEP: (own.low, own.high)})
        found = estimate([measured(0, 1.0), quick])
        return found.gain(found.measured[1], found.measured[0], STEP)

    widths = [found.high / found.low for found in map(gain, (1.2, 2.0, 2.9, 3.1, 5.0))]
    assert widths == pytest.approx(sorted(widths), rel=0.2) and widths[-1] > 2 * widths[0]
    assert not gain(5.0).told


def test_the_mean_of_equal_readings_is_that_reading():
    """A rounding made it another one, by which a trial of the same memory was said to read better."""
    sizes = [104e6 + n for n in range(20)]
    found = estimate([measured(n, 0.1, size, rounds=[0.1, 0.1]) for n, size in enumerate(sizes)])
    assert [m.metrics["peak_memory_bytes"] for m in found.measured] == sizes


def test_rounds_that_check_no_gradient_make_no_trial_need_less_memory():
    """On a CPU a round reads some MiB less: what was measured once was said to need 1.02x the memory, at equal memory."""

    def takes(m):
        again = {n: {**found, "peak_memory_bytes": 97e6 + 1e5 * n} for n, found in m.repeats.items()}
        return replace(m, ci95={}, repeats=again)

    trials = [measured(0, rounds=[0.1] * 3), measured(1, rounds=[0.1], zero_stage=1), measured(2, memory=100.2e6)]
    found = estimate([takes(m) for m in [*trials, measured(3, memory=98e6)]])
    gains = [found.gains(m)["peak_memory_bytes"] for m in found.measured]
    assert [gain.factor for gain in gains] == pytest.approx([1.0, 1.0, 0.998, 1.02], abs=1.5e-3)
    assert [gain.told for gain in gains] == [False, False, False, True]


def test_a_trial_that_was_stopped_early_has_no_gain_in_time():
    """Its interval was 1e-22 to 1e22 in `report.json`."""
    found = estimate([measured(0, 0.1), replace(measured(1, 0.2), outcome=Outcome.STOPPED_EARLY)])
    assert set(found.gains(found.measured[1])) == {"peak_memory_bytes"} < set(found.gains(found.measured[0]))


@pytest.mark.parametrize(("sitting", "twin"), [(0, 2), (1, 3)])
def test_a_trial_that_was_stopped_early_stands_on_the_machine_on_which_the_others_do(sitting, twin):
    """The machine slowed down when the best were measured again: what was stopped for being slower read faster than they."""
    again = [measured(0, 0.1, rounds=[0.2, 0.2]), measured(1, 0.11, rounds=[0.22, 0.22]), measured(2, 0.12)]
    later = [replace(measured(n, 0.12), sitting=1) for n in (3, 4)]
    stopped = replace(measured(5, 0.12), outcome=Outcome.STOPPED_EARLY, sitting=sitting, ci95={STEP: (0.11, 0.13)})
    found = {m.trial: m for m in estimate([*again, *later, stopped]).measured}
    own = found[5].metrics
    assert own[STEP] == pytest.approx(found[twin].metrics[STEP], rel=0.05) and abs(own[STEP] - 0.12) > 0.01
    assert own["samples_per_s"] * own[STEP] == pytest.approx(8)
    assert found[5].ci95[STEP] == pytest.approx((own[STEP] * 11 / 12, own[STEP] * 13 / 12))


@pytest.mark.parametrize(
    ("sizes", "known"), [([64], True), ([64, 63, 62], True), ([64, 64, 64, 32], True), ([64, 48], False)]
)
def test_a_trial_that_was_stopped_before_its_worst_batch_has_no_peak_where_batches_differ_in_size(sizes, known):
    result = TrialResult(outcome=Outcome.STOPPED_EARLY, peak_memory_bytes=7, taken_in={"elements": sizes})
    assert ("peak_memory_bytes" in measure(result, None)) is known


def test_a_trial_of_one_timed_step_is_known_less_well_than_one_of_many():
    """As where the trial's deadline was near: its gains were stated as narrowly as those of a hundred steps."""

    def width(n_steps):
        share = summarise([1.0, 1.0, *(1.0 + 0.02 * (n % 3) for n in range(n_steps))]).relative_ci

        def of(number, step_s):
            m = measured(number, step_s)
            return replace(m, ci95={**m.ci95, "step_time_s": ((1 - share) * step_s, (1 + share) * step_s)})

        found = estimate([of(0, 0.1), of(1, 0.075), of(2, 0.11)])
        gain = found.gain(found.measured[1], found.measured[0], "step_time_s")
        return gain.high / gain.low

    assert width(1) > 1.5 * width(4) > 1.5 * width(60)
