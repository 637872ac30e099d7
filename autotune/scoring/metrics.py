"""The metrics of a trial, each with its unit, direction and interval."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from autotune.errors import nearest
from autotune.scoring.convergence.noise_scale import efficiency
from autotune.scoring.convergence.time_to_loss import Reference, time_to_loss
from autotune.scoring.rates import Estimate, rate_of
from autotune.trial.result import Outcome, TrialResult

Direction = Literal["minimize", "maximize"]
Kind = Literal["time", "rate", "count", "memory", "per_step", "per_sample"]
GOODPUT = "goodput_samples_per_s"
# Batches are alike in size where the largest is below this many times the usual one.
ALIKE = 1.1


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One quantity that a trial yields.

    Attributes:
        direction: Which way is better.
        kind: How search and estimates treat it. `time` is the step time, a `rate` the samples (or tokens) of a step over it, `count` a
            rate or time in which a number of samples counts besides, `memory` the peak. Others get a model from their own readings, which
            expects them to get worse with the time of a step (`per_step`) or of a sample (`per_sample`).
        of: Returns the estimate from a trial, or None if that trial does not yield the quantity.
        why_missing: The explanation to show where the estimate is None.
    """

    unit: str
    direction: Direction
    kind: Kind
    label: str
    of: Callable[[TrialResult, Reference | None], Estimate | None]
    why_missing: str = "the trial timed no step"


def goodput(result: TrialResult, reference: Reference | None) -> Estimate | None:
    """Goodput: throughput x statistical efficiency relative to the baseline's batch (Pollux, OSDI 2021), in samples/s.

    The interval joins that of the throughput with that of the noise scale, as if they met at their worst. At the
    baseline's own batch goodput is the throughput, whatever the noise. None at another batch where the noise scale is
    not known. Where only its lower end is, that is taken: what a larger batch is surely worth. Where it still grew, or
    may be larger, a smaller batch is worth no more than the baseline's: near the initial weights small batches look
    better than they are.
    """
    rate, batch = METRICS["samples_per_s"].of(result, reference), result.samples_per_step
    if rate is None or not batch or reference is None or not reference.batch:
        return None
    if batch == reference.batch:
        return rate
    noise = reference.noise
    if noise is None or not noise.compares:
        return None
    most = math.inf if noise.resolved and not noise.growing else 1.0
    scales = (noise.low, noise.samples, noise.high) if noise.resolved else (noise.low,) * 3
    shares = [min(most, efficiency(phi, batch, reference.batch)) for phi in scales]
    return Estimate(value=rate.value * shares[1], low=rate.low * min(shares), high=rate.high * max(shares))


def _step_time(result: TrialResult, _: Reference | None) -> Estimate | None:
    if result.steps is None or not result.steps.median_s > 0:
        return None
    median, half = result.steps.median_s, result.steps.ci95_s
    # An interval as wide as the value says that its spread is not known, as of steps that were timed together: its end is zero. Where
    # steps were seen to differ by more, a tenth stands for that end: zero has no logarithm, by which trials are compared.
    return Estimate(value=median, low=max(median / 10 if half > median else 0.0, median - half), high=median + half)


def _rate(
    amount: Callable[[TrialResult], int | None], counted: str
) -> Callable[[TrialResult, Reference | None], Estimate | None]:
    """A rate: what the timed steps took in over their time; `amount` a step where the single steps are not known."""

    def of(result: TrialResult, reference: Reference | None) -> Estimate | None:
        time, n = _step_time(result, reference), amount(result)
        if time is None or not n:
            return None
        rate = rate_of(result, counted)
        # The reciprocal of an interval that reaches zero has no end; ten times the rate stands for it.
        return rate or Estimate(value=n / time.value, low=n / time.high, high=n / max(time.low, time.value / 10))

    return of


def _joules_per_sample(result: TrialResult, reference: Reference | None) -> Estimate | None:
    """Energy of all devices, as their drivers count it: mean power times the time of a sample."""
    rate, load = METRICS["samples_per_s"].of(result, reference), result.device_load
    if rate is None or load is None or not load.power_w:
        return None
    return Estimate(value=load.power_w / rate.value, low=load.power_w / rate.high, high=load.power_w / rate.low)


def _exact(amount: Callable[[TrialResult], float | None]) -> Callable[[TrialResult, Reference | None], Estimate | None]:
    def of(result: TrialResult, _: Reference | None) -> Estimate | None:
        value = amount(result)
        return None if value is None or not math.isfinite(value) else Estimate(value=value, low=value, high=value)

    return of


def _peak(result: TrialResult) -> float | None:
    """Peak memory; None of a trial that was stopped before its longest batch, where batches differ in size."""
    sizes = result.taken_in.get("elements") or [0]
    differ = max(sizes) > ALIKE * statistics.median(
        sizes
    )  # else a large one was seen; one may be the short last of an epoch
    cut_short = result.outcome is Outcome.STOPPED_EARLY and differ and not result.tail
    return None if cut_short else result.peak_memory_bytes


METRICS: dict[str, Metric] = {
    "step_time_s": Metric(unit="s", direction="minimize", kind="time", label="step time", of=_step_time),
    "samples_per_s": Metric(
        unit="samples/s", direction="maximize", kind="rate", label="throughput", of=_rate(lambda r: r.samples_per_step, "samples"),
    ),
    "tokens_per_s": Metric(
        unit="tokens/s", direction="maximize", kind="rate", label="tokens per second", of=_rate(lambda r: r.tokens_per_step, "real_tokens"),
        why_missing="the batches hold no token sequences; use samples_per_s",
    ),
    "padded_tokens_per_s": Metric(
        unit="tokens/s", direction="maximize", kind="rate", label="tokens per second, padding included",
        of=_rate(lambda r: r.tokens_per_step, "tokens"),
        why_missing="the batches hold no token sequences; use samples_per_s",
    ),
    "peak_memory_bytes": Metric(
        unit="B", direction="minimize", kind="memory", label="peak memory", of=_exact(_peak),
        why_missing="the trial reported no memory",
    ),
    "time_to_loss_s": Metric(
        unit="s", direction="minimize", kind="count", label="time to the baseline's loss", of=time_to_loss,
        why_missing="the trial's losses are missing or not finite",
    ),
    GOODPUT: Metric(
        unit="samples/s", direction="maximize", kind="count", label="goodput", of=goodput,
        why_missing="the noise scale is not resolved",
    ),
    "joules_per_sample": Metric(
        unit="J", direction="minimize", kind="per_sample", label="energy per sample", of=_joules_per_sample,
        why_missing="the device's power is not measured: it takes an NVIDIA GPU and `pip install nvidia-ml-py`",
    ),
    "cpu_s_per_step": Metric(
        unit="s", direction="minimize", kind="per_step", label="CPU time per step", of=_exact(lambda r: r.cpu_s_per_step),
    ),
}  # fmt: skip


def of_kind(*kinds: Kind) -> frozenset[str]:
    """The names of the metrics of some kinds."""
    return frozenset(name for name, metric in METRICS.items() if metric.kind in kinds)


def check_metric(name: str) -> None:
    """Refuses a metric that does not exist."""
    if name not in METRICS:
        raise ValueError(
            f"unknown metric {name!r}.{nearest(name, METRICS)} Known: {', '.join(METRICS)}. See `autotune ls metrics`."
        )


def measure(result: TrialResult, reference: Reference | None) -> dict[str, Estimate]:
    """Every metric that the trial yields."""
    estimates = {name: metric.of(result, reference) for name, metric in METRICS.items()}
    return {name: estimate for name, estimate in estimates.items() if estimate is not None}


def remeasured(result: TrialResult, reference: Reference | None) -> dict[str, float]:
    """The values of a trial that was measured again, which times steps and is too short for a loss curve."""
    reference = replace(reference, loss_target=None) if reference is not None else None
    return {name: estimate.value for name, estimate in measure(result, reference).items()}
