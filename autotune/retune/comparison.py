"""Statistics of rounds in turns: has a configuration drifted against the baseline, and which of two is better?"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.scoring.estimates import estimate
from autotune.scoring.measured import Measured, log_ratio, weighted_gain
from autotune.scoring.objective import Objective
from autotune.scoring.quantiles import Z95, t95
from autotune.scoring.reasons import DRIFT
from autotune.scoring.shared_cores import SLOPE
from autotune.space.candidate import Candidate
from autotune.trial.result import Outcome

# A configuration is unmoved if its step time over the baseline's is shown to have changed by less than this share.
MARGIN = 0.04
# Standard errors of that test, the one-sided normal quantile of 99 %. Few rounds tell little of their own spread: of those that
# moved by just as much, 1 to 5 in 100 are taken for unmoved.
UNMOVED_Z = 2.33
# Rounds: at least, at most, and the standard error of the log ratio that is small enough to stop.
FEWEST, MOST, ENOUGH_SE = 3, 10, 0.007
# Measurements of what is in use that must fail before it loses to what runs: one may be the machine's fault.
FAILURES_THAT_TELL = 2
# Standard deviation of two runs of one configuration that were measured at different times: 2 %, as on a quiet machine.
ASSUMED_SPREAD = 0.02
# Smallest standard deviation of a log ratio that is assumed, since few rounds may agree by chance.
LEAST_SPREAD = 0.004
MEMORY_MOVED = 0.1  # change of peak memory, as a share, that starts a search
MANY_TIMES = 2.0  # from this factor on a change is stated as a factor, not as a percentage
SURE = 0.995  # one-sided probability with which a replacement must be better
Rounds = Callable[[int], Mapping[str, "Reading"]]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One measurement of one side."""

    outcome: Outcome
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def completed(self) -> bool:
        """Whether it has a step time to compare."""
        return self.outcome is Outcome.COMPLETE and "step_time_s" in self.metrics

    @property
    def end(self) -> str:
        """How it ended, with the reason if it did not complete."""
        return f"{self.outcome.replace('_', ' ')}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class EarlierRatio:
    """Step time of the configuration in use over the baseline's, when it was found.

    Attributes:
        logs: Logarithms of the ratio, one per round.
        across: Whether a single ratio of two trials, taken at different times, replaces rounds.
        step_time_s: The baseline's step time.
        peak_memory_bytes: Of the configuration in use.
    """

    logs: Sequence[float]
    across: bool = False
    step_time_s: float | None = None
    peak_memory_bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class DriftCheck:
    """Whether the ratio of the configuration in use to the baseline has changed.

    Attributes:
        moved: Whether it has, or the opposite could not be shown.
        shift: Growth of the logarithm of that ratio; None if unknown.
        shift_ci95: Its 95 % interval.
        machine: Growth of the logarithm of the baseline's own step time.
    """

    moved: bool
    reason: str
    shift: float | None = None
    shift_ci95: tuple[float, float] | None = None
    n_rounds: int = 0
    machine: float | None = None

    def lines(self) -> list[str]:
        """The check for people."""
        found = []
        if self.shift is not None and self.shift_ci95 is not None:
            low, high = (math.expm1(end) for end in self.shift_ci95)
            interval = f"({low:+.1%} to {high:+.1%}), {self.n_rounds} rounds"
            found.append(f"step time against the baseline's: {math.expm1(self.shift):+.1%} since then {interval}")
        if self.machine is not None and abs(self.machine) > DRIFT:
            found.append(f"the baseline itself is {_pace(self.machine)} than it was")
        return found


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of a challenger against the configuration in use.

    Attributes:
        gain: Geometric mean of the challenger's gains over the objectives, as a share; None if one did not run.
        gain_ci95: Its 95 % interval.
        sure: Whether the challenger is better with probability `SURE`.
        speedup: Throughput over the other's.
        speedup_ci95: Its 95 % interval.
        failed: Why the challenger, or the one in use, did not run to its end.
        won: Whether the challenger wins because the other cannot run.
    """

    gain: float | None
    gain_ci95: tuple[float, float] | None = None
    sure: bool = False
    speedup: float | None = None
    speedup_ci95: tuple[float, float] | None = None
    n_rounds: int = 0
    failed: str = ""
    won: bool = False

    def decides(self, min_gain: float) -> bool:
        """Whether the challenger replaces the other."""
        return self.won or (self.sure and self.gain is not None and self.gain >= min_gain)

    @property
    def words(self) -> str:
        """The outcome in a few words."""
        if self.gain is None or self.gain_ci95 is None:
            return self.failed
        low, high = self.gain_ci95
        return f"{self.gain:+.1%} over all objectives ({low:+.1%} to {high:+.1%})"

    def why_not(self, min_gain: float) -> str:
        """Why the configuration in use stays."""
        if self.failed:
            return f"the best that was found did not hold: {self.failed}"
        if not self.sure:
            return f"what was found is not better beyond noise: {self.words}"
        return f"what was found is better, but by less than --min-gain {min_gain:.3g}: {self.words}"

    def lines(self) -> list[str]:
        """The comparison for people."""
        if self.gain is None:
            return []
        found = [f"gain {self.words}, {self.n_rounds} rounds in turns"]
        if self.speedup is not None and self.speedup_ci95 is not None:
            found.append(f"throughput {self.speedup:.3f}x ({self.speedup_ci95[0]:.3f} to {self.speedup_ci95[1]:.3f})")
        return found


def earlier_ratio(measured: Sequence[Measured], incumbent: Candidate, baseline: Candidate) -> EarlierRatio | None:
    """Ratio of two configurations' step times in a study; None if it did not measure both."""
    found = {m.candidate: m for m in estimate(measured).measured if m.usable or m.candidate == baseline}
    own, base = found.get(incumbent), found.get(baseline)
    if own is None or base is None or base.outcome is not Outcome.COMPLETE:
        return None
    then: dict[str, Any] = {
        "step_time_s": base.metrics.get("step_time_s"), "peak_memory_bytes": own.metrics.get("peak_memory_bytes")
    }  # fmt: skip
    if own is base:
        return EarlierRatio(logs=(), **then)
    pairs = _paired_log_ratios(own, base)
    logs = pairs or [log_ratio(own, base, "step_time_s")]
    return EarlierRatio(logs=tuple(logs), across=not pairs, **then)


def _paired_log_ratios(measured: Measured, reference: Measured) -> list[float]:
    """Logarithms of the step time over the reference's, one for each round in which both were measured, beside equal load."""
    found = []
    for n, again in measured.repeats.items():
        own, other = (values.get("step_time_s") for values in (again, reference.repeats.get(n, {})))
        loads = [each.log_slowdown[n] for each in (measured, reference) if n in each.log_slowdown]
        if own and other:
            found.append(math.log(own / other) - (SLOPE * (loads[0] - loads[1]) if len(loads) == 2 else 0.0))
    return found


def check_drift(then: EarlierRatio | None, rounds: Rounds) -> DriftCheck:
    """Measure `incumbent` and `baseline` in turns until it is clear whether their ratio has changed.

    An equivalence test: unmoved must be shown, with the shift's interval inside the margin. Everything else leads to a
    search, which costs trials; replacing a configuration takes stronger evidence (`compare`).

    Args:
        then: Their ratio when the configuration was found; None if unknown.
    """
    logs: list[float] = []
    base_s: list[float] = []
    peaks: list[float] = []
    for n in range(1, MOST + 1):
        taken = rounds(n)
        incumbent, baseline = taken["incumbent"], taken["baseline"]
        if not incumbent.completed:
            return DriftCheck(moved=True, reason=f"what is in use does not run any more ({incumbent.end})")
        if not baseline.completed:
            any_more = " any more" * (then is not None)
            return DriftCheck(moved=True, reason=f"the baseline does not run{any_more} ({baseline.end})", n_rounds=n)
        logs.append(math.log(incumbent.metrics["step_time_s"] / baseline.metrics["step_time_s"]))
        base_s.append(baseline.metrics["step_time_s"])
        peaks.append(incumbent.metrics.get("peak_memory_bytes", 0.0))
        if then is not None and not then.logs:
            break  # the baseline is in use
        # Against a single ratio of two trials no number of rounds shows that it is unmoved.
        if n >= FEWEST and (then is None or then.across or _se(logs, then.logs) <= ENOUGH_SE):
            break
    if then is None:
        return DriftCheck(moved=True, reason="the baseline did not run then, or was another one", n_rounds=len(logs))
    machine = math.log(statistics.median(base_s) / then.step_time_s) if then.step_time_s else None
    known = then.peak_memory_bytes if min(peaks) > 0 else None
    grown = math.log(statistics.median(peaks) / known) if known else 0.0
    common: dict[str, Any] = {"n_rounds": len(logs), "machine": machine}
    if abs(grown) > MEMORY_MOVED:
        return DriftCheck(moved=True, reason=f"what is in use needs {math.expm1(grown):+.0%} memory", **common)
    if not then.logs:
        return DriftCheck(moved=False, reason="what is in use is the baseline itself, and it still runs", **common)
    return _shifted(then, logs, common)


def _shifted(then: EarlierRatio, logs: Sequence[float], common: Mapping[str, Any]) -> DriftCheck:
    """The equivalence test of the log ratios of today's rounds against the earlier ones."""
    shift = statistics.fmean(logs) - statistics.fmean(then.logs)
    before = ASSUMED_SPREAD * math.sqrt(2) if then.across else _spread(logs, then.logs) / math.sqrt(len(then.logs))
    now = _se(logs, then.logs)
    se = math.hypot(now, before)
    # By Student's t: a few rounds tell little of their own spread. What is assumed of two trials is known.
    t = t95(_degrees(logs, then.logs))
    reach = math.hypot(t * now, (Z95 if then.across else t) * before)
    moved = abs(shift) + UNMOVED_Z * se >= math.log1p(MARGIN)
    if not moved:
        reason = f"its step time against the baseline's is what it was, within {MARGIN:.0%}"
    elif abs(shift) > reach:
        reason = f"against the baseline, what is in use is {_pace(shift)} than it was"
    else:
        reason = f"the noise ({se:.1%}) hides whether what is in use has moved against the baseline"
    return DriftCheck(
        moved=moved, reason=reason, shift=shift, shift_ci95=(shift - reach, shift + reach), **common
    )  # fmt: skip


def _pace(log: float) -> str:
    """A change of step time in words, given its logarithm: `12% slower`, or `2.7 times slower`."""
    factor, word = math.exp(abs(log)), "slower" if log > 0 else "faster"
    return f"{factor - 1:.0%} {word}" if factor < MANY_TIMES else f"{factor:.1f} times {word}"


@dataclass(frozen=True)
class _Mean:
    """Mean of log ratios with its standard error."""

    value: float
    se: float
    degrees: int

    @classmethod
    def of(cls, logs: Sequence[float]) -> "_Mean":
        return cls(statistics.fmean(logs), _se(logs), len(logs) - 1)

    @property
    def reach(self) -> float:
        """Half-width of the 95 % interval."""
        return t95(self.degrees) * self.se

    @property
    def sure(self) -> bool:
        """Whether it is positive with probability `SURE`."""
        from scipy import special

        return self.value - float(special.stdtrit(self.degrees, SURE)) * self.se > 0


def compare(
    objectives: Sequence[Objective], both: tuple[Measured | None, Measured | None], min_gain: float, rounds: Rounds
) -> Comparison:  # fmt: skip
    """Measure `challenger` and `incumbent` in turns until the winner is clear.

    Only these rounds count: the challenger was selected for a good trial, so that trial is biased.

    Args:
        both: The trials of the two, for metrics that need a loss curve, for which rounds are too short.
        min_gain: Smallest gain with which the challenger replaces the incumbent, as a share (0.03 is 3 %).
    """
    gains: list[float] = []
    rates: list[float] = []
    failed = 0
    wanted = math.log1p(min_gain)
    for n in range(1, MOST + FAILURES_THAT_TELL):  # a round that failed does not count
        taken = rounds(n)
        challenger, incumbent = taken["challenger"], taken["incumbent"]
        if not challenger.completed:
            return Comparison(gain=None, n_rounds=n, failed=challenger.end)
        if not incumbent.completed:
            failed += 1
            if failed == FAILURES_THAT_TELL:
                failure = f"what is in use does not run any more ({incumbent.end})"
                return Comparison(gain=None, won=True, failed=failure)
            continue
        gains.append(_gain(objectives, both, challenger.metrics, incumbent.metrics))
        rates.append(math.log(challenger.metrics["samples_per_s"] / incumbent.metrics["samples_per_s"]))
        if len(gains) < FEWEST:
            continue
        gain = _Mean.of(gains)
        hopeless = gain.value + gain.reach < wanted
        if len(gains) == MOST or hopeless or (gain.sure and abs(gain.value - wanted) > 2 * gain.se):
            break
    gain, rate = _Mean.of(gains), _Mean.of(rates)
    return Comparison(
        gain=math.expm1(gain.value), sure=gain.sure, speedup=math.exp(rate.value), n_rounds=len(gains),
        gain_ci95=(math.expm1(gain.value - gain.reach), math.expm1(gain.value + gain.reach)),
        speedup_ci95=(math.exp(rate.value - rate.reach), math.exp(rate.value + rate.reach)),
    )  # fmt: skip


def _gain(
    objectives: Sequence[Objective],
    both: tuple[Measured | None, Measured | None],
    own: Mapping[str, float],
    other: Mapping[str, float],
) -> float:
    """Weighted mean over the objectives of the logarithm of the gain in one round."""
    ratios = {each.metric: _log_ratio(each.metric, both, own, other) for each in objectives}
    known = {metric: ratio for metric, ratio in ratios.items() if ratio is not None}
    return weighted_gain(known, objectives) if known else math.log(own["samples_per_s"] / other["samples_per_s"])


def _log_ratio(
    metric: str, both: tuple[Measured | None, Measured | None], own: Mapping[str, float], other: Mapping[str, float]
) -> float | None:
    if own.get(metric, 0) > 0 and other.get(metric, 0) > 0:
        return math.log(own[metric] / other[metric])
    first, second = both
    if first is None or second is None:
        return None
    a, b, a_s, b_s = (each.metrics.get(name, 0.0) for name in (metric, "step_time_s") for each in (first, second))
    if min(a, b, a_s, b_s) <= 0:
        return None
    # A loss curve in steps is the configuration's own; how long a step takes, the round says.
    return math.log(a / b) - math.log(a_s / b_s) + math.log(own["step_time_s"] / other["step_time_s"])


def _spread(logs: Sequence[float], earlier: Sequence[float]) -> float:
    """Standard deviation of one log ratio, pooled over what was measured then and now."""
    degrees = _degrees(logs, earlier)
    if not degrees:
        return ASSUMED_SPREAD * math.sqrt(2)
    squares = sum((value - statistics.fmean(group)) ** 2 for group in (logs, earlier) for value in group)
    return max(LEAST_SPREAD, math.sqrt(squares / degrees))


def _degrees(*groups: Sequence[float]) -> int:
    """Degrees of freedom of a spread that is pooled over groups."""
    return sum(max(0, len(group) - 1) for group in groups)


def _se(logs: Sequence[float], earlier: Sequence[float] = ()) -> float:
    return _spread(logs, earlier) / math.sqrt(len(logs))
