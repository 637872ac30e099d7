"""The estimates of a study: one value and interval for each metric of each trial, from all measurements together.

Everything that is shown, ranked or recommended rests on them. The times come from the joint posterior of all readings
(`posterior`); the other metrics that time decides follow from each trial's own ratio to its step time.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autotune.scoring import posterior, samples
from autotune.scoring.convergence.branch import Branch
from autotune.scoring.measured import Foretold, Measured, baseline_of, improvement, log_ratio
from autotune.scoring.metrics import GOODPUT, METRICS, of_kind
from autotune.scoring.objective import Objective, beyond
from autotune.scoring.posterior import Posterior, Readings
from autotune.scoring.quantiles import Z95, t95, t_quantile
from autotune.scoring.shared_cores import SLOPE, SPREAD
from autotune.trial.result import RAN, Outcome

# What is said of a difference that the scatter of the measurements may make, and of the best of several trials, which it favours.
WITHIN_NOISE, READS_BETTER = "within noise", "reads better than it is"
STEP, RATE, TO_TARGET, PEAK = "step_time_s", "samples_per_s", "time_to_loss_s", "peak_memory_bytes"
# Metrics that are a constant, the trial's own, times or over its step time.
TIMED = of_kind("time", "rate", "count")
# Degrees of freedom that the prior of the noise is worth to a 95 % interval, and the fewest that are counted far out.
PRIOR_DEGREES = LEAST_FAR_OUT = 8
# What the noise scale and a trial's own loss curve foretell of another batch is off by this (standard deviation of the
# logarithm) for each doubling: predicted over measured times to a target loss in benchmarks/time_to_target.py.
FORETOLD_SD = 0.15
# Least error of one reading of a rate over what the step time says, as the standard deviation of its logarithm.
LEAST_RATE_SD = 0.002
# An interval of a gain wider than this, high over low, says nothing.
WIDEST = 4.0


class Gain(NamedTuple):
    """The factor by which a trial is better (above 1) than another one in a metric, with its 95 % interval."""

    factor: float
    low: float
    high: float

    @property
    def told(self) -> bool:
        """Whether the two can be told apart."""
        return not self.low <= 1.0 <= self.high

    @property
    def vague(self) -> bool:
        """Whether the interval is so wide that it says nothing."""
        return self.high > WIDEST * self.low


@dataclass(frozen=True)
class Estimates:
    """What all measurements of a study say of its trials; made by `estimate`.

    Attributes:
        measured: The trials; their metrics and intervals are the estimates.
        raw: The same trials as they were measured, by number.
        baseline: The user's own configuration, if it completed.
    """

    measured: Sequence[Measured]
    raw: Mapping[int, Measured]
    baseline: Measured | None
    _posterior: Posterior | None
    _rows: Mapping[int, int]
    _degrees: int
    # By trial and metric: half-width of the interval's logarithm that no timing narrows.
    _beyond: Mapping[tuple[int, str], float]
    _usual_load: float

    @cached_property
    def n_looked_at(self) -> int:
        """Trials of which a pick may be the luckiest, those that were stopped early for being slower among them."""
        return sum(m.outcome in RAN and m.feasible for m in self.measured)

    def sd(self, one: Measured, other: Measured) -> float:
        """Standard deviation of the logarithm of the ratio of two trials' step times; infinite if one has none."""
        rows = self._rows.get(one.trial), self._rows.get(other.trial)
        if one.trial == other.trial:
            return 0.0
        if self._posterior is None or rows[0] is None or rows[1] is None:
            return math.inf
        return self._posterior.sd_of_difference(rows[0], rows[1])

    def unforetold(self, measured: Measured) -> tuple[float, float]:
        """By how much a trial's fastest and its slowest reading differ from what all others foretell (logarithms); 0 if expected."""
        row = self._rows.get(measured.trial)
        if self._posterior is None or row is None:
            return 0.0, 0.0
        return -float(self._posterior.least[row]), float(self._posterior.most[row])

    def covariance(self, trials: Sequence[Measured]) -> np.ndarray:
        """Covariance of the logarithms of the step times of trials, which all have one."""
        rows = [self._rows[m.trial] for m in trials]
        assert self._posterior is not None
        return self._posterior.cov[np.ix_(rows, rows)]

    def gain(self, measured: Measured, reference: Measured, metric: str) -> Gain | None:
        """The gain of a trial over another one; None where one of them lacks the metric."""
        own, other = measured.metrics.get(metric), reference.metrics.get(metric)
        if not (own and other and own > 0 and other > 0):
            return None
        centre = improvement(math.log(own / other), metric)
        reach = 0.0 if measured.trial == reference.trial else self._reach(measured, reference, metric)
        # Beyond the range of a float, as of two trials without a common measure.
        reach = min(reach, 50.0)
        return Gain(math.exp(centre), math.exp(centre - reach), math.exp(centre + reach))

    def _reach(self, measured: Measured, reference: Measured, metric: str) -> float:
        beyond = [self._beyond.get((m.trial, metric), 0.0) for m in (measured, reference)]
        timed = t95(self._degrees) * self.sd(measured, reference) if metric in TIMED else 0.0
        return math.hypot(timed, *beyond)

    def told(self, measured: Measured, metric: str) -> bool:
        """Whether a trial differs from the baseline by a metric: a loss beyond its own interval, a gain beyond luck as well.

        A trial is looked at for what it gains, so its gain has to be more than the best of as many equal ones would read.
        """
        assert self.baseline is not None
        gain = self.gain(measured, self.baseline, metric)
        if gain is None or not gain.told or gain.factor < 1:
            return gain is not None and gain.told
        return math.log(gain.factor) > self.reach(measured, self.baseline, [Objective(name=metric, metric=metric)])

    def reach(
        self,
        one: Measured,
        other: Measured,
        objectives: Sequence[Objective],
        more: int = 0,
        left: float = 1.0,
        *,
        alone: bool = False,
    ) -> float:
        """Differences of two trials' log gains below this are noise, where one of them was picked for reading well.

        The 95 % interval holds for all trials and after each round that both were in, together: the best of 30 equal ones looks
        better than the baseline beyond its own interval in every fourth study. By Bonferroni's inequality, with Student's
        t that far out: with few degrees of freedom its tails are much heavier than its 95 % interval tells. Out there the
        prior of the noise, which may be off by a factor of two, is worth the one degree that it states, whatever it adds to
        the coverage of ordinary intervals.

        Args:
            more: Rounds that count besides; each of them has both trials, which tells of the noise, too.
            left: Share of the variance of the step times' ratio that is left after them.
            alone: Neither was picked: this comparison is the only one.
        """
        n_looks = min(len(one.repeats), len(other.repeats)) + more
        n_compared = 1 if alone else max(1, self.n_looked_at - 1) * max(1, n_looks)
        degrees = max(LEAST_FAR_OUT, self._degrees - PRIOR_DEGREES + 1 + more)
        share, quantile = timed_share(objectives), t_quantile(1 - 0.025 / n_compared, degrees)
        timed = share * math.sqrt(left) * self.sd(one, other) if share else 0.0
        return quantile * math.hypot(timed, self._beyond_sd(one, other, objectives))

    def _beyond_sd(self, one: Measured, other: Measured, objectives: Sequence[Objective]) -> float:
        """Standard deviation of the difference of two trials' log gains by what no timing narrows."""
        if one.trial == other.trial:
            return 0.0
        total = sum(o.weight for o in objectives)
        parts = [o.weight * self._beyond.get((m.trial, o.metric), 0.0) for m in (one, other) for o in objectives]
        return math.hypot(*parts) / Z95 / total

    def speedup(self, measured: Measured) -> Gain | None:
        """Throughput over the baseline's; None without one, or where the interval says nothing."""
        found = self.gain(measured, self.baseline, "samples_per_s") if self.baseline is not None else None
        return found if found is not None and not found.vague else None

    def gains(self, measured: Measured) -> dict[str, Gain]:
        """The gains over the baseline by metric; of a trial that ended early none in time, which has no estimate."""
        if self.baseline is None:
            return {}
        names = (name for name in measured.metrics if name in METRICS)
        known = (name for name in names if name not in TIMED or measured.trial in self._rows)
        return {name: gain for name in known if (gain := self.gain(measured, self.baseline, name)) is not None}

    @property
    def noise_sd(self) -> float:
        """Standard deviation of the logarithm of one reading of a step time, beside the usual load by others."""
        return math.hypot(self._posterior.noise_sd, SPREAD * self._usual_load) if self._posterior else math.inf

    @property
    def drift(self) -> float:
        """Logarithm of the baseline's step time in the rounds over that of its first measurement; 0 without rounds."""
        raw = self.raw[self.baseline.trial] if self.baseline is not None else None
        again = [values[STEP] for values in raw.repeats.values() if values.get(STEP, 0) > 0] if raw is not None else []
        if raw is None or not again or not raw.metrics.get(STEP, 0) > 0:
            return 0.0
        return sum(map(math.log, again)) / len(again) - math.log(raw.metrics[STEP])


def timed_share(objectives: Sequence[Objective]) -> float:
    """The share of the objectives' weight that the step time decides."""
    return sum(o.weight for o in objectives if o.metric in TIMED) / sum(o.weight for o in objectives)


def estimate(measured: Sequence[Measured]) -> Estimates:
    """The estimates of a study's trials.

    Args:
        measured: Every told trial with its re-measurements, in the order of their numbers.
    """
    raw = {m.trial: m for m in measured}
    measured = _with_pooled_samples(measured)
    timed = [m for m in measured if m.outcome in (Outcome.COMPLETE, Outcome.DIVERGED) and m.metrics.get(STEP, 0) > 0]
    rows = {m.trial: i for i, m in enumerate(timed)}
    usual = _usual_load(timed)
    readings = _readings(timed, usual)
    found = posterior.fit(readings) if timed else None
    n_again = int((readings.round > 0).sum())
    slower = _machine_on_average(timed, found, usual) if found is not None else {}
    degrees = PRIOR_DEGREES + max(0, n_again - len(set(readings.round.tolist()) - {0}))
    quantile = t95(degrees)
    beyond: dict[tuple[int, str], float] = {}
    estimated, rates, memory = [], _rates(timed), _memory_of_rounds(timed)
    for m in measured:
        if found is None or m.trial not in rows:
            stopped = m.outcome is Outcome.STOPPED_EARLY  # its figures stand beside the others' estimates
            apart = slower.get(m.sitting, SLOPE * usual) - SLOPE * m.log_slowdown.get(0, usual)
            metrics, ci95 = slowed(m.metrics, m.ci95, apart if stopped else 0.0)
            estimated.append(replace(m, metrics=metrics, ci95=ci95))
            continue
        row = rows[m.trial]
        step = math.exp(found.mean[row]), quantile * math.sqrt(max(0.0, found.cov[row, row]))
        rate = rates.get(m.trial, (0.0, math.inf))
        estimated.append(_estimated(m, *step, quantile * found.noise_sd, rate, memory, beyond))
    baseline = baseline_of(estimated)
    if baseline is not None:
        decided = (m for m in estimated if m.branch is not None and m.branch.samples_ratio)
        branches = {m.training: m.branch for m in sorted(decided, key=lambda m: m.branch.n_samples if m.branch else 0)}
        if branches:
            estimated = [_with_branch(m, baseline, branches.get(m.training), beyond) for m in estimated]
    estimated = [replace(m, feasible=_holds_bounds(m)) if m.bounds else m for m in estimated]
    baseline = next((m for m in estimated if baseline is not None and m.trial == 0), None)
    return Estimates(estimated, raw, baseline, found, rows, degrees, beyond, usual)


def _usual_load(timed: Sequence[Measured]) -> float:
    """What other processes did to a reading on average, which stands for what they did where that was not counted."""
    known = [m.log_slowdown[number] for m in timed for number in (0, *m.repeats) if number in m.log_slowdown]
    return sum(known) / max(1, len(known))


def _machine_on_average(timed: Sequence[Measured], found: Posterior, usual: float) -> dict[int, float]:
    """By sitting the logarithm by which the machine was slower on average than it would have been then beside no other process."""
    apart = [
        found.mean[row] - math.log(m.metrics[STEP]) + SLOPE * m.log_slowdown.get(0, usual)
        for row, m in enumerate(timed)
    ]
    return {
        sitting: float(np.median([each for m, each in zip(timed, apart, strict=True) if m.sitting == sitting]))
        for sitting in {m.sitting for m in timed}
    }


def slowed(
    metrics: Mapping[str, float], ci95: Mapping[str, tuple[float, float]], by: float
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Metrics and intervals as on a machine that is slower by a logarithm."""
    factors = {name: math.exp(improvement(-by, name)) for name in TIMED}
    return (
        {name: value * factors.get(name, 1.0) for name, value in metrics.items()},
        {name: (low * factors.get(name, 1.0), high * factors.get(name, 1.0)) for name, (low, high) in ci95.items()},
    )


def _holds_bounds(m: Measured) -> bool:
    """Whether the estimates of a trial hold every constraint; as its own run did where one has no estimate."""
    known = [(m.metrics[bound[0]], bound) for bound in m.bounds if bound[0] in m.metrics]
    if m.outcome is not Outcome.COMPLETE or len(known) < len(m.bounds):
        return m.feasible
    return all(beyond(value, bound) <= 0 for value, bound in known)


def _with_pooled_samples(measured: Sequence[Measured]) -> list[Measured]:
    """The trials with the time to the target that their own step time and the samples of all trials together make."""
    needed = [STEP, "samples_per_s", TO_TARGET]
    some = [m for m in measured if m.outcome is Outcome.COMPLETE and all(m.metrics.get(name, 0) > 0 for name in needed)]
    if len(some) < 2:
        return list(measured)
    step, rate, to_target = (np.log(np.array([m.metrics[name] for m in some])) for name in needed)
    numerics = [(m.candidate.precision, m.numerics_kept) for m in some]
    pooled = samples.pooled(to_target + rate, step + rate, numerics, *np.array([_sides(m) for m in some]).T / Z95)
    found = {}
    for m, log_value, below, above in zip(some, pooled.mean - rate, pooled.below, pooled.above, strict=True):
        value, timed = math.exp(log_value), _log_half_width(m, STEP)
        ends = value * math.exp(-Z95 * below - timed), value * math.exp(Z95 * above + timed)
        found[m.trial] = replace(m, metrics={**m.metrics, TO_TARGET: value}, ci95={**m.ci95, TO_TARGET: ends})
    return [found.get(m.trial, m) for m in measured]


def _with_branch(
    m: Measured, baseline: Measured, branch: Branch | None, beyond: dict[tuple[int, str], float]
) -> Measured:
    """A trial with what a branch of its batch and numerics showed of the samples that it needs, weighed against what was foretold."""
    rates = [each.metrics.get("samples_per_s", 0.0) for each in (m, baseline)]
    if branch is None or not branch.samples_ratio or min(rates) <= 0:
        return m
    faster = math.log(rates[0] / rates[1])
    doublings = abs(math.log2(m.candidate.samples_per_rank / baseline.candidate.samples_per_rank))
    metrics, ci95 = dict(m.metrics), dict(m.ci95)
    for name in (GOODPUT, TO_TARGET):
        if metrics.get(name, 0.0) <= 0 or baseline.metrics.get(name, 0.0) <= 0:
            continue
        foretold = faster - improvement(log_ratio(m, baseline, name), name)
        sd = math.hypot(FORETOLD_SD * doublings, beyond.get((m.trial, name), 0.0) / Z95)
        share = sd**2 / (sd**2 + branch.samples_sd**2) if sd > 0 else 0.0
        metrics[name] *= math.exp(-improvement(share * (math.log(branch.samples_ratio) - foretold), name))
        beyond[m.trial, name] = Z95 * math.sqrt(share) * branch.samples_sd
        wide = math.exp(math.hypot(_log_half_width(m, STEP), beyond[m.trial, name]))
        ci95[name] = metrics[name] / wide, metrics[name] * wide
    return replace(m, metrics=metrics, ci95=ci95)


def _readings(timed: Sequence[Measured], usual: float) -> Readings:
    """The step times of trials, first measurements and rounds, beside what load by others is usual."""
    found = []
    for row, m in enumerate(timed):
        low, high = m.ci95.get(STEP, (0.0, 0.0))
        # A re-measurement takes as long as the trial, so its own noise is that of the trial.
        own = math.log(high / low) / 2 / Z95 if 0 < low < high else 0.0
        again = ((number, values[STEP]) for number, values in m.repeats.items() if values.get(STEP, 0) > 0)
        load = {number: m.log_slowdown.get(number, usual) for number in (0, *m.repeats)}
        found += [
            (math.log(value), math.hypot(own, SPREAD * load[number]), row, number, m.sitting, load[number])
            for number, value in ((0, m.metrics[STEP]), *again)
        ]
    columns = np.array(found, dtype=float).reshape(len(found), 6)
    foretold = [m.forecast or Foretold(math.nan, ()) for m in timed]
    width = max((len(each.row) for each in foretold), default=0)
    factor = np.array([each.row or (0.0,) * width for each in foretold]).reshape(len(timed), width)
    return Readings(
        log_value=columns[:, 0],
        own_sd=columns[:, 1],
        trial=columns[:, 2].astype(np.intp),
        round=columns[:, 3].astype(np.intp),
        sitting=columns[:, 4].astype(np.intp),
        slowed=columns[:, 5] - usual,
        forecast=np.array([each.mean for each in foretold]),
        forecast_cov=factor @ factor.T,
    )


def _rates(timed: Sequence[Measured]) -> dict[int, tuple[float, float]]:
    """By trial what its throughput exceeds the first reading by, at the same step time, and its standard deviation; as logarithms.

    Throughput counts every step, and so what disturbed a few of them; the step time is their median. What lies between the
    two, over all readings of a trial, is the configuration's own as far as trials differ in it beyond their errors.
    """
    found = []
    for m in timed:
        readings = [each for each in (m.metrics, *m.repeats.values()) if min(each.get(STEP, 0), each.get(RATE, 0)) > 0]
        if m.metrics.get(RATE, 0) <= 0:
            continue
        logs = [math.log(each[RATE] * each[STEP] / m.candidate.samples_per_rank) for each in readings]
        error = max(LEAST_RATE_SD, _log_half_width(m, RATE) / Z95)
        found.append((m.trial, logs[0], sum(logs) / len(logs), error**2 / len(logs)))
    if not found:
        return {}
    numbers, firsts, means, variances = (np.array(each) for each in zip(*found, strict=True))
    pooled, left = posterior.shrunk(means, variances)
    return dict(
        zip(numbers.tolist(), zip((pooled - firsts).tolist(), np.sqrt(left).tolist(), strict=True), strict=True)
    )


def _memory_of_rounds(timed: Sequence[Measured]) -> tuple[float, float]:
    """What a trial's own run takes of memory more than a round of it, and half-width of one reading's interval; as logarithms.

    A round does without the checks of the trial's own run, as that of the first gradient.
    """
    peaks = [[each.get(PEAK, 0.0) for each in (m.metrics, *m.repeats.values())] for m in timed]
    logs = [np.log([peak for peak in each if peak > 0]) for each in peaks if each[0] > 0 and any(each[1:])]
    if not logs:
        return 0.0, 0.0
    more = float(np.median([each[0] - np.median(each[1:]) for each in logs]))
    degrees = sum(len(each) - 1 for each in logs) - 1
    spread = sum(len(each) * float(np.append(each[0] - more, each[1:]).var()) for each in logs)
    return more, t95(degrees) * math.sqrt(spread / degrees) if degrees else 0.0


def _estimated(
    m: Measured,
    step_s: float,
    reach: float,
    noise: float,
    rate: tuple[float, float],
    memory: tuple[float, float],
    beyond: dict[tuple[int, str], float],
) -> Measured:
    """A trial with the estimates in place of what it measured.

    Args:
        step_s: The estimate of its step time.
        reach: Half-width of the interval of its logarithm.
        noise: Half-width of the interval of one measurement of a time.
        rate: What its throughput exceeds the first reading by at the same step time, and its standard deviation; as logarithms.
        memory: What `_memory_of_rounds` returns.
        beyond: Gets the half-widths that no timing narrows.
    """
    moved = math.log(step_s / m.metrics[STEP])
    own_reach, (exceeds, rate_sd) = _log_half_width(m, STEP), rate
    # What is still open of the width of its rate, and so of all that follows from it.
    wider = max(0.0, _log_half_width(m, RATE) - own_reach)
    left = min(wider, Z95 * rate_sd)
    metrics, ci95 = dict(m.metrics), dict(m.ci95)
    for name, value in m.metrics.items():
        if name in TIMED and value > 0:
            metrics[name] = value * math.exp(improvement((exceeds if name != STEP else 0.0) - moved, name))
            more = max(0.0, _log_half_width(m, name) - own_reach)
            # The samples to the target are those of all trials' curves: they hold nothing of its rate's width.
            more = math.hypot(more, left) if name == TO_TARGET else max(0.0, more - (wider - left))
            beyond[m.trial, name] = more
            wide = math.hypot(reach, more)
            ci95[name] = metrics[name] * math.exp(-wide), metrics[name] * math.exp(wide)
        elif name in METRICS and value > 0:
            # A time, and the energy that goes with it, is as noisy as the step time.
            more, wide = memory if METRICS[name].kind == "memory" else (0.0, noise)
            seen = [value, *(math.exp(more) * again[name] for again in m.repeats.values() if again.get(name, 0) > 0)]
            # Equal readings are their own mean, which logarithms would miss by a rounding that ranks one trial before another.
            metrics[name] = value if len(set(seen)) == 1 else math.exp(sum(map(math.log, seen)) / len(seen))
            wide = math.exp(wide / math.sqrt(len(seen)))
            low, high = m.ci95.get(name, (value, value))
            ci95[name] = min(low, *seen, metrics[name] / wide), max(high, *seen, metrics[name] * wide)
            beyond[m.trial, name] = math.log(ci95[name][1] / ci95[name][0]) / 2 if ci95[name][0] > 0 else 0.0
    return replace(m, metrics=metrics, ci95=ci95)


def _sides(m: Measured) -> tuple[float, float]:
    """How far the truth may lie below and above what a trial's loss curve reads, by its interval without the step time's."""
    value, (low, high) = m.metrics[TO_TARGET], m.ci95.get(TO_TARGET, (0.0, 0.0))
    if not 0 < low <= value <= high:
        return 0.0, 0.0
    timed = _log_half_width(m, STEP)
    return max(0.0, math.log(value / low) - timed), max(0.0, math.log(high / value) - timed)


def _log_half_width(m: Measured, metric: str) -> float:
    low, high = m.ci95.get(metric, (0.0, 0.0))
    return math.log(high / low) / 2 if 0 < low < high else 0.0
