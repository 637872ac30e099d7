"""Metrics, objectives, constraints, and the time to a loss."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from autotune.errors import UserError
from autotune.scoring.convergence.noise_scale import ENDLESS, NoiseScale
from autotune.scoring.convergence.time_to_loss import Reference, time_to_loss
from autotune.scoring.metrics import METRICS, goodput, measure
from autotune.scoring.objective import Constraint, Objective, check_measurable, score
from autotune.scoring.step_times import summarise
from autotune.system.units import parse_bytes, parse_seconds
from autotune.trial.result import Outcome, StepStats, TrialResult

LATENCY = Objective(name="latency", metric="step_time_s")
THROUGHPUT = Objective(name="throughput", metric="samples_per_s")
CONVERGENCE = Objective(name="convergence", metric="time_to_loss_s")


def trial(**changes):
    steps = StepStats(median_s=0.5, ci95_s=0.05, n_steps=20, n_warmup=1)
    values = {
        "outcome": Outcome.COMPLETE,
        "steps": steps,
        "samples_per_step": 16,
        "peak_memory_bytes": 1000,
        "cpu_s_per_step": 0.8,
    }
    return TrialResult(**(values | changes))


def loss_at(samples, batch):
    """A loss curve as language models have it; beyond 64 samples a larger batch gains little."""
    return 1.5 + 4 * (1 + samples / (1 + batch / 64) / 200) ** -0.5


def training(batch, n_steps, seed=None, sigma=0.8, step_s=0.1):
    noise = (
        np.zeros(n_steps)
        if seed is None
        else np.random.default_rng(seed).standard_normal(n_steps) * sigma / math.sqrt(batch)
    )
    losses = [float(loss_at(index * batch, batch) + noise[index]) for index in range(n_steps)]
    return trial(
        samples_per_step=batch, losses=losses, steps=StepStats(median_s=step_s, ci95_s=0.0, n_steps=n_steps, n_warmup=1)
    )


def true_time(batch, target, step_s=0.1):
    samples = ((4 / (target - 1.5)) ** 2 - 1) * 200 * (1 + batch / 64)
    return samples / batch * step_s


def test_the_metrics_of_a_trial_are_those_of_its_steps_with_their_intervals():
    found = measure(trial(tokens_per_step=1600), None)
    for name, wanted in {
        "step_time_s": (0.5, 0.45, 0.55), "samples_per_s": (32, 16 / 0.55, 16 / 0.45),
        "tokens_per_s": (3200, 1600 / 0.55, 1600 / 0.45), "peak_memory_bytes": (1000, 1000, 1000), "cpu_s_per_step": (0.8, 0.8, 0.8),
    }.items():  # fmt: skip
        assert (found[name].value, found[name].low, found[name].high) == pytest.approx(wanted)
    assert "tokens_per_s" not in measure(trial(), None)
    assert set(measure(TrialResult(outcome=Outcome.OOM, peak_memory_bytes=5), None)) == {"peak_memory_bytes"}
    assert all(metric.unit and metric.label and metric.why_missing for metric in METRICS.values())


def test_too_few_steps_for_an_interval_give_a_wide_finite_one():
    estimates = measure(trial(steps=summarise([0.9, 0.6, 0.5, 0.5])), None)
    assert (estimates["step_time_s"].low, estimates["step_time_s"].high) == pytest.approx((0.285, 0.715))
    assert all(math.isfinite(end) for estimate in estimates.values() for end in (estimate.low, estimate.high))


def test_the_baseline_reaches_its_own_loss_at_its_end():
    baseline = training(16, 100)
    estimate = time_to_loss(baseline, Reference.of(baseline))
    # The loss of the last quarter is that of weights which have seen 7/8 of the samples, and half a step.
    assert estimate.value == pytest.approx((100 - (25 + 1) / 2) * 0.1)
    assert estimate.low < estimate.value < estimate.high and not estimate.censored


@pytest.mark.parametrize("batch", [8, 16, 32, 64, 256])
def test_without_noise_the_time_to_loss_is_the_true_one_for_every_batch(batch):
    reference = Reference.of(training(16, 100))
    estimate = time_to_loss(training(batch, 4800 // batch), reference)
    assert estimate.value == pytest.approx(true_time(batch, reference.loss_target), rel=0.02)


@pytest.mark.parametrize("batch", [8, 32, 256])
def test_noise_that_depends_on_the_batch_does_not_bias_the_time_to_loss(batch):
    clean = true_time(batch, Reference.of(training(16, 100)).loss_target)
    found = [
        time_to_loss(training(batch, 4000 // batch, seed=1000 + seed), Reference.of(training(16, 100, seed=seed)))
        for seed in range(60)
    ]
    assert np.median([estimate.value for estimate in found]) == pytest.approx(clean, rel=0.04)
    assert np.mean([estimate.low <= clean <= estimate.high for estimate in found]) > 0.8


def test_a_loss_curve_that_tells_nothing_towards_zero_is_not_taken_for_exact():
    """Its interval began at zero, which counted as no width at all where all trials' curves are weighed."""
    rng, ends = np.random.default_rng(0), []
    while len(ends) < 60:
        noisy = [3 - 0.3 * math.log(1 + 8 * i / 100) + 0.2 * rng.standard_normal() for i in range(24)]
        reference = Reference.of(trial(losses=noisy, samples_per_step=8))
        if reference.loss_target is not None:
            ends.append(measure(trial(losses=noisy, samples_per_step=8), reference)["time_to_loss_s"])
    assert all(each.value / 10 <= each.low <= each.value for each in ends)
    assert any(each.low == each.value / 10 for each in ends)


def test_a_trial_that_ends_above_the_target_is_extrapolated_and_says_so():
    reference = Reference.of(training(16, 100))
    estimate = time_to_loss(training(16, 60), reference)
    assert estimate.censored and estimate.value == pytest.approx(true_time(16, reference.loss_target), rel=0.1)
    assert estimate.high == pytest.approx(10 * 60 * 0.1)


@pytest.mark.parametrize("n_steps", [1, 50])
def test_a_trial_that_does_not_learn_is_capped_at_ten_times_its_samples(n_steps):
    flat = trial(losses=[6.0] * n_steps, samples_per_step=16)
    estimate = time_to_loss(flat, Reference.of(training(16, 100)))
    assert estimate.censored and estimate.value == pytest.approx(10 * n_steps * 0.5) and estimate.high >= estimate.value


def test_the_time_to_loss_is_the_same_each_time():
    noisy, reference = training(8, 200, seed=1), Reference.of(training(16, 100, seed=2))
    assert time_to_loss(noisy, reference) == time_to_loss(noisy, reference)


def test_the_time_to_loss_of_a_thousand_steps_takes_no_time():
    noisy, reference = training(8, 1000, seed=1), Reference.of(training(16, 100, seed=2))
    start = time.process_time()
    for _ in range(5):
        time_to_loss(noisy, reference)
    assert (time.process_time() - start) / 5 < 0.1


@pytest.mark.parametrize("losses", [[], [3.0] * 29 + [None]])
def test_losses_that_are_missing_give_no_time_to_loss(losses):
    assert time_to_loss(trial(losses=losses), Reference.of(training(16, 100))) is None


@pytest.mark.parametrize(
    ("baseline", "said"),
    [
        (trial(losses=[]), "missing"),
        (trial(losses=[5.0, 4.0, 3.0]), "too few"),
        (trial(losses=[3.0 + 0.01 * (-1) ** index for index in range(40)]), "did not fall"),
        (trial(losses=[3.0 + 0.1 * index for index in range(40)]), "did not fall"),
    ],
)
def test_a_baseline_that_does_not_learn_sets_no_target_and_says_why(baseline, said):
    reference = Reference.of(baseline)
    assert reference.loss_target is None and said in reference.problem
    assert time_to_loss(training(16, 100), reference) is None


def test_a_score_has_the_objectives_in_order_and_every_metric_of_the_trial():
    found = score(trial(), [THROUGHPUT, LATENCY])
    assert found.values == (32.0, 0.5) and found.metrics["peak_memory_bytes"] == 1000 and found.censored == ()
    assert found.ci95["step_time_s"] == pytest.approx((0.45, 0.55))
    ended = score(training(16, 60), [CONVERGENCE], (), Reference.of(training(16, 100)))
    assert ended.censored == ("time_to_loss_s",)


def test_a_failed_trial_has_no_values_but_all_its_bounds():
    limits = [Constraint(metric="step_time_s", max=1), Constraint(metric="samples_per_s", min=1)]
    failed, fine = (score(result, [LATENCY], limits) for result in (TrialResult(outcome=Outcome.CRASHED), trial()))
    assert failed.values is None and not failed.feasible and fine.feasible
    assert failed.violations.keys() == fine.violations.keys() == {"step_time_s <= max", "samples_per_s >= min"}


def test_a_violation_is_a_share_of_the_bound_the_tightest_one_counts_and_a_bound_of_an_objective_too():
    limits = [Constraint(metric="peak_memory_bytes", max=800), Constraint(metric="samples_per_s", min=64)]
    found = score(trial(), [LATENCY], limits)
    assert found.violations == {"peak_memory_bytes <= max": 0.25, "samples_per_s >= min": 0.5} and not found.feasible
    found = score(trial(), [LATENCY], [Constraint(metric="peak_memory_bytes", max="1000B")])
    assert found.violations == {"peak_memory_bytes <= max": 0.0} and found.feasible
    bounded = Objective(name="latency", metric="step_time_s", max="400ms")
    found = score(trial(), [bounded], [Constraint(metric="step_time_s", max=1)])
    assert found.violations == {"step_time_s <= max": pytest.approx(0.25)}


FLAT = trial(losses=[3.0 + 0.01 * (-1) ** index for index in range(40)])


@pytest.mark.parametrize(
    ("baseline", "objective", "limits", "said"),
    [
        (
            trial(), Objective(name="tokens", metric="tokens_per_s"), (),
            r"objective 'tokens': tokens_per_s cannot be measured .* use samples_per_s",
        ),
        (
            trial(peak_memory_bytes=None), LATENCY, [Constraint(metric="peak_memory_bytes", max=1)],
            "constraint: peak_memory_bytes cannot be measured",
        ),
        (FLAT, CONVERGENCE, (), "loss did not fall during its trial; raise trial_budget_s in study.yaml"),
        # Only its deadline ends a trial after so few steps, whatever its budget.
        (training(16, 3), CONVERGENCE, (), "3 steps, too few for a loss curve; --fresh with a longer --trial-deadline"),
    ],
)  # fmt: skip
def test_what_the_baseline_does_not_yield_stops_the_study_with_a_reason(baseline, objective, limits, said):
    with pytest.raises(UserError, match=said):
        check_measurable(baseline, [objective], limits, Reference.of(baseline))
    good = training(16, 100)
    check_measurable(good, [LATENCY, THROUGHPUT, CONVERGENCE], (), Reference.of(good))


@pytest.mark.parametrize(
    ("text", "amount"),
    [("4GiB", 4 * 2**30), ("500 MB", 500_000_000), ("1.5kib", 1536), (1024, 1024), ("1024", 1024), ("1e3", 1000)],
)
def test_bytes_are_read_with_their_unit(text, amount):
    assert parse_bytes(text) == amount


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10m", 600), ("1h30m", 5400), ("250ms", 0.25), ("1 h 5 s", 3605), (600, 600), ("2.5", 2.5), ("1e-3s", 1e-3)],
)
def test_seconds_are_read_with_their_unit(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "m", "10 lightyears", "-5s", "10m 3", True, None, [1], "1..2s"])
def test_an_amount_that_is_none_names_the_units(text):
    with pytest.raises(ValueError, match="units: us, ms, s"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"metric": "step_tim_s", "max": 1}, "'step_time_s'"),
        ({"metric": "step_time_s"}, "`min` or a `max`"),
        ({"metric": "step_time_s", "max": "4GiB"}, "units: us"),
        ({"metric": "samples_per_s", "min": "4"}, "not a number of samples/s"),
        ({"metric": "step_time_s", "min": 2, "max": 1}, "nothing can hold it"),
        ({"metric": "step_time_s", "maximum": 2}, "maximum"),
        ({"metric": "step_time_s", "max": math.nan}, "finite"),
    ],
)
def test_a_constraint_that_cannot_be_is_refused(data, said):
    with pytest.raises(ValidationError, match=said):
        Constraint.model_validate(data)


@pytest.mark.parametrize("weight", [0, -1, math.inf, math.nan])
def test_a_weight_is_positive_and_finite(weight):
    with pytest.raises(ValidationError):
        Objective(name="latency", metric="step_time_s", weight=weight)


def known(phi, *, resolved=True, batch=16):
    return Reference(batch=batch, noise=NoiseScale(samples=phi, low=phi / 1.2, high=phi * 1.2, resolved=resolved))


def test_goodput_is_throughput_times_efficiency_and_at_the_baselines_batch_the_throughput():
    same, larger = trial(samples_per_step=16), trial(samples_per_step=64)
    rate = METRICS["samples_per_s"].of(larger, None)
    found = goodput(larger, known(48.0))
    assert found.value == pytest.approx(rate.value * (48 + 16) / (48 + 64))
    assert found.low < found.value < found.high
    assert goodput(same, known(48.0)) == METRICS["samples_per_s"].of(same, None)


def test_where_the_noise_scale_still_grows_a_smaller_batch_is_worth_no_more_than_the_baselines():
    growing = replace(known(48.0), noise=replace(known(48.0).noise, growing=True))
    small, large = trial(samples_per_step=8), trial(samples_per_step=64)
    assert goodput(small, known(48.0)).value > goodput(small, growing).value
    assert goodput(small, growing).value == pytest.approx(METRICS["samples_per_s"].of(small, None).value)
    assert goodput(large, growing) == goodput(large, known(48.0))


def test_a_noise_scale_known_from_below_gives_larger_batches_their_least_worth_and_smaller_ones_no_credit():
    """The baseline's batch was kept for the whole study, where eight times as large a one was surely worth trying."""
    below, large, small = known(48.0, resolved=False), trial(samples_per_step=64), trial(samples_per_step=8)
    rate, found = METRICS["samples_per_s"].of(large, None), goodput(large, below)
    share = (40 + 16) / (
        40 + 64
    )  # no end of an interval is wider than the rate's, of which an estimate makes both ends
    assert (found.value, found.high) == pytest.approx((rate.value * share, rate.high * share))
    assert goodput(small, below).value == pytest.approx(METRICS["samples_per_s"].of(small, None).value)


@pytest.mark.parametrize("low", [0.0, ENDLESS])
def test_an_unknown_noise_scale_leaves_only_the_question_at_the_same_batch(low):
    unknown = replace(known(48.0), noise=replace(known(48.0).noise, low=low, high=ENDLESS, resolved=False))
    assert goodput(trial(samples_per_step=64), unknown) is None
    assert goodput(trial(samples_per_step=16), unknown) is not None
    assert goodput(trial(samples_per_step=16), None) is None
