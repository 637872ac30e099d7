"""What a study optimises: the table of metrics, objectives and constraints on them, and the score of a trial."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from autotune import UserError
from autotune.candidate import nearest
from autotune.convergence import NoiseScale, efficiency
from autotune.stats import StepStats
from autotune.trial import TrialResult

Direction = Literal["minimize", "maximize"]
Floats = NDArray[np.float64]

# A candidate that did not reach the target is extrapolated to at most this many times the samples it saw.
EXTRAPOLATION_CAP = 10.0
REPLICATES = 200
GOODPUT = "goodput_samples_per_s"
BYTES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
# A part of an amount: a number, and a unit or none.
AMOUNT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")
LARGEST_AMOUNT = 1e18
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


class ObjectiveError(UserError):
    """An objective or a constraint that cannot be read, or not be measured on this target."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A measured value with its 95 % interval.

    Attributes:
        value: The value, in the metric's unit.
        low: Lower end of the interval.
        high: Upper end of the interval.
        censored: The trial ended before the value could be seen; it is extrapolated.
    """

    value: float
    low: float
    high: float
    censored: bool = False


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One quantity that a trial yields.

    Attributes:
        unit: Its unit.
        direction: Which way is better.
        label: Its name for people.
        of: Its estimate from a trial, or None if that trial does not yield it.
        why_missing: What to say where it is None.
    """

    unit: str
    direction: Direction
    label: str
    of: Callable[[TrialResult, Reference | None], Estimate | None]
    why_missing: str = "the trial timed no step"


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What candidates are compared with: the loss that the baseline's trial ends at.

    Attributes:
        loss_target: Mean loss over the last `window_samples` of the baseline's trial; None if the loss did not fall.
        loss_target_sd: Standard error of the target.
        window_samples: Samples that losses are averaged over, the same for every candidate.
        problem: Why there is no target.
        batch: Samples of the baseline's optimizer step.
        noise: The gradient noise scale; None if it was not measured.
        noise_problem: Why it was not.
    """

    loss_target: float | None = None
    loss_target_sd: float = 0.0
    window_samples: float = 0.0
    problem: str = ""
    batch: int = 0
    noise: NoiseScale | None = None
    noise_problem: str = "it was not measured"

    @classmethod
    def of(cls, baseline: TrialResult) -> Reference:
        """The reference that the baseline's trial gives.

        The window is the last quarter of its samples. The loss must have fallen from the first window to the last by
        more than twice the standard error of that difference, else no target is set: reaching it would mean nothing.
        """
        losses = _losses(baseline)
        batch = baseline.samples_per_step
        if losses is None or not batch:
            return cls(problem="the baseline's losses are missing or not finite", batch=batch or 0)
        if len(losses) < 4:
            return cls(
                batch=batch,
                problem=f"the baseline trained {len(losses)} steps, too few for a loss curve; raise trial_budget_s",
            )
        n = max(1, len(losses) // 4)
        target = float(losses[-n:].mean())
        error = _standard_error(losses, n)
        if float(losses[:n].mean()) - target <= 2 * math.sqrt(2) * error:
            return cls(batch=batch, problem="the baseline's loss did not fall during its trial; raise trial_budget_s")
        return cls(batch=batch, loss_target=target, loss_target_sd=error, window_samples=float(n * batch))


def time_to_loss(result: TrialResult, reference: Reference | None) -> Estimate | None:
    """Seconds of training until the loss first is the baseline's final one; near the initial weights small batches win that too easily.

    For a trial with B samples per step and losses l_1 .. l_n (equal seed and data order in all trials of a study):

    * The loss curve is averaged over the same number of *samples* W in all trials (`reference.window_samples`, at
      least B), since a loss over B samples has noise of sd / sqrt(B). With C(s) the summed loss of the first s samples,
      L(s) = (C(s) - C(s - W)) / W.
    * l_i is the loss of the weights after (i - 1) B samples, so the mean weights behind L(s) have seen
      x(s) = s - (W + B) / 2 samples; without that term large batches would look late. For s < W the window is s.
    * x* is where L crosses the target, linear between steps; where noise makes it cross more than once, the mean of the
      first and the last crossing, as the first alone comes early. time = x* / B x median step time.
    * If the trial ends above the target, the loss is extrapolated, linear in log(samples) as fitted over all but the
      first quarter of the trial (the second half alone has four times the error in simulation), to at most 10 times the
      samples seen; the estimate is then `censored` and its interval goes up to that cap.
    * The interval is that of a block bootstrap of the residuals about the averaged curve (fixed seed), with the error
      of the target and of the step time drawn along.

    Limits: a window of W on a convex curve reads high where the curve is steep, which counts against candidates that
    reach the target within less than about W samples; the extrapolation knows no plateau; the target is one trial's,
    and what is reached sooner in training loss need not generalise as well.
    """
    losses = _losses(result)
    batch, steps = result.samples_per_step, result.steps
    if losses is None or not batch or steps is None or reference is None or reference.loss_target is None:
        return None
    window = max(reference.window_samples, float(batch))
    position, smooth = _smoothed(losses[None, :], batch, window)
    seen = float(len(losses) * batch)
    samples, censored = _reached(position, smooth, np.array([reference.loss_target]), losses[None, :], seen, batch)
    rng = np.random.default_rng(0)
    replicas = _replicas(losses, batch, window, rng)
    targets = reference.loss_target + reference.loss_target_sd * rng.standard_normal(len(replicas))
    drawn, _ = _reached(*_smoothed(replicas, batch, window), targets, replicas, seen, batch)
    spread = _half_width(steps) / 1.96 / steps.median_s
    drawn_s = drawn / batch * steps.median_s * np.maximum(0.0, 1 + spread * rng.standard_normal(len(replicas)))
    value = float(samples[0]) / batch * steps.median_s
    low, high = (float(bound) for bound in np.quantile(drawn_s, (0.025, 0.975)))
    if censored[0]:
        high = max(high, EXTRAPOLATION_CAP * seen / batch * steps.median_s)
    return Estimate(value=value, low=min(low, value), high=max(high, value), censored=bool(censored[0]))


def goodput(result: TrialResult, reference: Reference | None) -> Estimate | None:
    """Samples per second, each counted as what it is worth at the baseline's batch: throughput x efficiency (Pollux, OSDI 2021).

    The interval joins that of the throughput with that of the noise scale, as if they met at their worst. At the baseline's
    own batch goodput is the throughput, whatever the noise. None at another batch where the noise scale is not resolved. Where
    it still grew, a smaller batch is worth no more than the baseline's: near the initial weights small batches look better than they are.
    """
    rate, batch = METRICS["samples_per_s"].of(result, reference), result.samples_per_step
    if rate is None or not batch or reference is None or not reference.batch:
        return None
    if batch == reference.batch:
        return rate
    noise = reference.noise
    if noise is None or not noise.resolved:
        return None
    most = 1.0 if noise.growing else math.inf
    shares = [min(most, efficiency(phi, batch, reference.batch)) for phi in (noise.low, noise.samples, noise.high)]
    return Estimate(value=rate.value * shares[1], low=rate.low * min(shares), high=rate.high * max(shares))


def _losses(result: TrialResult) -> Floats | None:
    """The trial's losses with the odd gap filled in; None if there are none, or more than a tenth is missing."""
    found = np.array([math.nan if loss is None else loss for loss in result.losses], dtype=float)
    good = np.isfinite(found)
    if not good.any() or not good[-1] or (~good).sum() > len(found) / 10:
        return None
    index = np.arange(len(found))
    return np.asarray(np.interp(index, index[good], found[good]), dtype=float)


def _smoothed(losses: Floats, batch: int, window: float) -> tuple[Floats, Floats]:
    """Samples that the averaged weights have seen (x), and the loss averaged over the window (L), at each step's end.

    Args:
        losses: One row for each replicate of the curve.
        batch: Samples per step.
        window: Samples to average over.
    """
    n = losses.shape[1]
    total = np.concatenate([np.zeros((len(losses), 1)), np.cumsum(losses, axis=1) * batch], axis=1)
    ends = np.arange(1, n + 1) * float(batch)
    widths = np.minimum(window, ends)
    start = (ends - widths) / batch
    whole = np.minimum(start.astype(int), n - 1)
    before = total[:, whole] + (start - whole) * (total[:, whole + 1] - total[:, whole])
    return ends - (widths + batch) / 2, np.asarray((total[:, 1:] - before) / widths, dtype=float)


def _reached(
    position: Floats, smooth: Floats, targets: Floats, losses: Floats, seen: float, batch: int
) -> tuple[Floats, NDArray[np.bool_]]:
    """For each row, the samples at which the target is reached, and whether that is extrapolated."""
    above = smooth > targets[:, None]
    below_at_end = ~above[:, -1]
    first = np.argmax(~above, axis=1)
    last = smooth.shape[1] - np.argmax(above[:, ::-1], axis=1)
    last = np.where(above.any(axis=1), last, 0)
    last = np.minimum(last, smooth.shape[1] - 1)
    crossing = (_crossing(position, smooth, targets, first) + _crossing(position, smooth, targets, last)) / 2
    beyond = _extrapolated(losses, targets, float(position[-1]), seen, batch)
    return np.where(below_at_end, crossing, beyond), ~below_at_end


def _crossing(position: Floats, smooth: Floats, targets: Floats, index: NDArray[np.intp]) -> Floats:
    rows = np.arange(len(smooth))
    before = np.maximum(index - 1, 0)
    high, low = smooth[rows, before], smooth[rows, index]
    share = np.where(high > low, (high - targets) / np.where(high > low, high - low, 1.0), 1.0)
    return np.asarray(position[before] + np.clip(share, 0.0, 1.0) * (position[index] - position[before]), dtype=float)


def _extrapolated(losses: Floats, targets: Floats, last: float, seen: float, batch: int) -> Floats:
    """Where the loss, linear in log samples over all but the first quarter of the trial, meets the target."""
    n = losses.shape[1]
    cap = EXTRAPOLATION_CAP * seen
    first = n // 4
    if n - first < 2:
        return np.full(len(losses), cap)
    logs = np.log((np.arange(first, n) + 0.5) * batch)
    centred = logs - logs.mean()
    slope = losses[:, first:] @ centred / float(centred @ centred)
    level = losses[:, first:].mean(axis=1)
    falling = slope < 0
    distance = np.where(falling, (targets - level) / np.where(falling, slope, -1.0), math.inf)
    meets = np.exp(np.minimum(logs.mean() + distance, math.log(cap)))
    return np.asarray(np.clip(meets, last, cap), dtype=float)


def _replicas(losses: Floats, batch: int, window: float, rng: np.random.Generator) -> Floats:
    """Bootstrap curves: the trend plus residuals drawn in blocks, since neighbouring steps err together."""
    n = len(losses)
    half = max(1, round(window / batch / 4))
    trend = _centred_mean(losses, half)
    residuals = losses - trend
    block = max(1, round(n ** (1 / 3)))
    starts = rng.integers(0, n, size=(REPLICATES, -(-n // block)))
    index = ((starts[:, :, None] + np.arange(block)).reshape(REPLICATES, -1) % n)[:, :n]
    # A mean over 2 half + 1 points takes that share of the noise with it; put it back.
    return np.asarray(trend + residuals[index] / math.sqrt(1 - 1 / (2 * half + 1)), dtype=float)


def _centred_mean(values: Floats, half: int) -> Floats:
    """Mean over the neighbours at equal distance on both sides, fewer towards the ends, so that a slope is kept."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    reach = np.minimum(half, np.minimum(index, len(values) - 1 - index))
    return np.asarray((total[index + reach + 1] - total[index - reach]) / (2 * reach + 1), dtype=float)


def _standard_error(losses: Floats, n: int) -> float:
    """Standard error of a mean of n losses, from differences of neighbours, which hardly see the trend."""
    return float(np.sqrt(np.mean(np.diff(losses[len(losses) // 2 :]) ** 2) / 2 / n))


def _half_width(steps: StepStats) -> float:
    """The interval's half-width; the median itself where two steps are too few for an interval."""
    return steps.ci95_s if math.isfinite(steps.ci95_s) else steps.median_s


def _step_time(result: TrialResult, _: Reference | None) -> Estimate | None:
    if result.steps is None or not result.steps.median_s > 0:
        return None
    median, half = result.steps.median_s, _half_width(result.steps)
    return Estimate(value=median, low=max(0.0, median - half), high=median + half)


def _rate(amount: Callable[[TrialResult], int | None]) -> Callable[[TrialResult, Reference | None], Estimate | None]:
    def of(result: TrialResult, reference: Reference | None) -> Estimate | None:
        time, n = _step_time(result, reference), amount(result)
        if time is None or not n:
            return None
        # The reciprocal of an interval that reaches zero has no end; ten times the rate stands for it.
        return Estimate(value=n / time.value, low=n / time.high, high=n / max(time.low, time.value / 10))

    return of


def _exact(amount: Callable[[TrialResult], float | None]) -> Callable[[TrialResult, Reference | None], Estimate | None]:
    def of(result: TrialResult, _: Reference | None) -> Estimate | None:
        value = amount(result)
        return None if value is None or not math.isfinite(value) else Estimate(value=value, low=value, high=value)

    return of


METRICS: dict[str, Metric] = {
    "step_time_s": Metric(unit="s", direction="minimize", label="step time", of=_step_time),
    "samples_per_s": Metric(unit="samples/s", direction="maximize", label="throughput", of=_rate(lambda r: r.samples_per_step)),
    "tokens_per_s": Metric(
        unit="tokens/s", direction="maximize", label="tokens per second", of=_rate(lambda r: r.tokens_per_step),
        why_missing="the batches hold no token sequences; use samples_per_s",
    ),
    "peak_memory_bytes": Metric(
        unit="B", direction="minimize", label="peak memory", of=_exact(lambda r: r.peak_memory_bytes),
        why_missing="the trial reported no memory",
    ),
    "time_to_loss_s": Metric(
        unit="s", direction="minimize", label="time to the baseline's loss", of=time_to_loss,
        why_missing="the trial's losses are missing or not finite",
    ),
    GOODPUT: Metric(
        unit="samples/s", direction="maximize", label="goodput", of=goodput, why_missing="the noise scale is not resolved",
    ),
    "cpu_s_per_step": Metric(unit="s", direction="minimize", label="CPU time per step", of=_exact(lambda r: r.cpu_s_per_step)),
}  # fmt: skip


def parse_bytes(value: Any) -> int:
    """Bytes from a number or a text such as `4GiB` or `500 MB`.

    Raises:
        ValueError: It names the units that are known.
    """
    return round(_parse_amount(value, BYTES, "4GiB"))


def parse_seconds(value: Any) -> float:
    """Seconds from a number or a text such as `10m`, `1h30m` or `250ms`.

    Raises:
        ValueError: It names the units that are known.
    """
    return _parse_amount(value, SECONDS, "1h30m")


def _parse_amount(value: Any, units: Mapping[str, float], example: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _finite(value)
    text = value.strip() if isinstance(value, str) else ""
    lower = {unit.lower(): factor for unit, factor in units.items()}
    parts, at = list[tuple[str, str]](), 0
    # Part by part: one expression for all of them would try every way to cut a long row of digits.
    while found := AMOUNT.match(text, at):
        parts.append((found[1], found[2].lower()))
        at = found.end()
    if not parts or at < len(text) or any(unit not in lower for _, unit in parts if unit or len(parts) > 1):
        raise ValueError(
            f"{value!r} is not a number or a number with a unit, as in {example!r}; units: {', '.join(units)}"
        )
    return _finite(sum(float(number) * (lower[unit] if unit else 1.0) for number, unit in parts))


def _finite(value: int | float) -> float:
    """The number as one that can be calculated with.

    Raises:
        ValueError: It is none, or too large.
    """
    if not abs(value) <= LARGEST_AMOUNT:  # nor is this what is not a number
        said = str(value) if isinstance(value, float) else f"a whole number of {value.bit_length()} bits"
        raise ValueError(f"{said} is not a finite number below {LARGEST_AMOUNT:g}")
    return float(value)


def parse_amount(value: Any, metric: str) -> float:
    """An amount of a metric, in the metric's unit; bytes and seconds may carry a unit (`4GiB`, `250ms`).

    Raises:
        ValueError: It says what is accepted.
    """
    match METRICS[metric].unit:
        case "B":
            return float(parse_bytes(value))
        case "s":
            return parse_seconds(value)
        case unit:
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise ValueError(f"{value!r} is not a number of {unit}")
            return _finite(value)


class _Bounded(BaseModel):
    """Something said about a metric, with bounds in the metric's unit (or a text with a unit)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    metric: str
    min: FiniteFloat | None = None
    max: FiniteFloat | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_amounts(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("metric"), str):
            return data
        check_metric(data["metric"])
        bounds = {key: parse_amount(data[key], data["metric"]) for key in ("min", "max") if data.get(key) is not None}
        return data | bounds

    @model_validator(mode="after")
    def _check_order(self) -> _Bounded:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}, so nothing can hold it")
        return self


class Objective(_Bounded):
    """One thing to optimise; its direction is the metric's.

    Attributes:
        name: What it is called, as in `latency`.
        metric: A key of `METRICS`.
        weight: How much it counts, relative to the others, where one candidate has to be picked.
        description: What it means, for people.
        min: Lower bound that a solution must keep, as a constraint does.
        max: Upper bound that a solution must keep, as a constraint does.
    """

    name: str = Field(min_length=1)
    weight: FiniteFloat = Field(default=1.0, gt=0, le=1e9)
    description: str = ""

    @property
    def direction(self) -> Direction:
        """Which way is better."""
        return METRICS[self.metric].direction


class Constraint(_Bounded):
    """A bound on a metric that a solution must keep.

    Attributes:
        metric: A key of `METRICS`.
        min: Lower bound, in the metric's unit.
        max: Upper bound, in the metric's unit.
    """

    @model_validator(mode="after")
    def _check_bounds(self) -> Constraint:
        if self.min is None and self.max is None:
            raise ValueError(f"{self.metric}: give a `min` or a `max`")
        return self


def check_metric(name: str) -> None:
    """Refuses a metric that does not exist.

    Raises:
        ValueError: It lists those that do.
    """
    if name not in METRICS:
        raise ValueError(
            f"unknown metric {name!r}.{nearest(name, METRICS)} Known: {', '.join(METRICS)}. See `autotune ls metrics`."
        )


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a trial is worth.

    Attributes:
        values: One number for each objective, in order, as measured (Optuna knows the directions); None if one of
            them could not be measured, see `missing`.
        metrics: Every metric that the trial yields.
        ci95: Its 95 % interval.
        violations: For each bound by how much it is exceeded, as a share of the bound: 0 or less means that it is held.
            The keys are those of `bounds`, in every trial.
        missing: Objectives and bounded metrics that could not be measured, with the reason.
        censored: Metrics whose value is extrapolated.
    """

    values: tuple[float, ...] | None
    metrics: dict[str, float]
    ci95: dict[str, tuple[float, float]]
    violations: dict[str, float]
    missing: dict[str, str] = field(default_factory=dict)
    censored: tuple[str, ...] = ()

    @property
    def feasible(self) -> bool:
        """Whether every bound is held."""
        return all(violation <= 0 for violation in self.violations.values())


def measure(result: TrialResult, reference: Reference | None) -> dict[str, Estimate]:
    """Every metric that the trial yields."""
    estimates = {name: metric.of(result, reference) for name, metric in METRICS.items()}
    return {name: estimate for name, estimate in estimates.items() if estimate is not None}


def bounds(
    objectives: Sequence[Objective], constraints: Sequence[Constraint]
) -> dict[str, tuple[str, Literal["min", "max"], float]]:
    """Every bound of a study by its key (`peak_memory_bytes <= max`): metric, which end, and the tightest amount given."""
    found: dict[str, tuple[str, Literal["min", "max"], float]] = {}
    for said in (*objectives, *constraints):
        if said.min is not None:
            key = f"{said.metric} >= min"
            found[key] = (said.metric, "min", max(said.min, found[key][2]) if key in found else said.min)
        if said.max is not None:
            key = f"{said.metric} <= max"
            found[key] = (said.metric, "max", min(said.max, found[key][2]) if key in found else said.max)
    return found


def score(
    result: TrialResult,
    objectives: Sequence[Objective],
    constraints: Sequence[Constraint] = (),
    reference: Reference | None = None,
) -> Score:
    """Scores a trial against the objectives and bounds of a study.

    A metric that the trial does not yield is not made up: `values` is None and `missing` says why, and a bound on it
    counts as exceeded by its whole amount. `check_measurable` turns that into an error for the baseline, before a study
    spends its budget.
    """
    estimates = measure(result, reference)
    limits = bounds(objectives, constraints)
    wanted = dict.fromkeys(
        [objective.metric for objective in objectives] + [metric for metric, _, _ in limits.values()]
    )
    missing = {metric: _why_missing(metric, reference) for metric in wanted if metric not in estimates}
    complete = all(objective.metric in estimates for objective in objectives)
    return Score(
        values=tuple(estimates[objective.metric].value for objective in objectives) if complete else None,
        metrics={name: estimate.value for name, estimate in estimates.items()},
        ci95={name: (estimate.low, estimate.high) for name, estimate in estimates.items()},
        violations={
            key: _violation(estimates.get(metric), end, amount) for key, (metric, end, amount) in limits.items()
        },
        missing=missing,
        censored=tuple(name for name, estimate in estimates.items() if estimate.censored),
    )


def check_measurable(
    baseline: TrialResult,
    objectives: Sequence[Objective],
    constraints: Sequence[Constraint],
    reference: Reference | None,
) -> None:
    """Refuses a study whose objectives or bounds the baseline's (complete) trial does not yield.

    Raises:
        ObjectiveError: It names the objective and the reason.
    """
    found = score(baseline, objectives, constraints, reference)
    for metric, reason in found.missing.items():
        name = next((objective.name for objective in objectives if objective.metric == metric), None)
        what = f"objective {name!r}" if name else "constraint"
        raise ObjectiveError(f"{what}: {metric} cannot be measured on this target: {reason}")


def _why_missing(metric: str, reference: Reference | None) -> str:
    if metric == GOODPUT and reference is not None and not (reference.noise and reference.noise.resolved):
        return reference.noise_problem
    if metric == "time_to_loss_s" and (reference is None or reference.problem):
        return reference.problem if reference else "there is no baseline to compare with"
    return METRICS[metric].why_missing


def _violation(estimate: Estimate | None, end: Literal["min", "max"], amount: float) -> float:
    if estimate is None:
        return 1.0
    over = estimate.value - amount if end == "max" else amount - estimate.value
    return over / abs(amount) if amount else over
