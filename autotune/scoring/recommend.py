"""From measurements to a recommendation: the front, the picks, their speed-ups, and the reasons in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.scoring import pareto, step_times
from autotune.scoring.measured import Measured, improvement, log_gain, log_ratio, paired_log_ratios
from autotune.scoring.metrics import GOODPUT, METRICS
from autotune.scoring.objective import Objective
from autotune.scoring.reasons import changes, checked, drift, named, passed_by, words

# Spread between two runs of one configuration where nothing was measured twice: 2 %, as on a quiet machine.
ASSUMED_SPREAD = 0.02
# Trials whose gains differ by less than 1 % are alike: the one that changes least is recommended.
TIE = 0.01
# A finalist that is behind by more than this multiple of the noise needs no further round.
CLEARLY = 2.0
# An interval of the speed-up wider than this, high over low, says nothing.
WIDEST = 4.0
# Name of the pick for the best trial that only a trial can run, where it beats those that the user can.
OUT_OF_REACH = "out_of_reach"
MEMORY = "peak_memory_bytes"
PICKS: dict[str, str] = {
    "lowest_latency": "step_time_s",
    "highest_throughput": "samples_per_s",
    "fastest_convergence": GOODPUT,
    "lowest_memory": MEMORY,
}


@dataclass(frozen=True, kw_only=True)
class Pick:
    """A recommended configuration.

    Attributes:
        measured: The trial.
        speedup: Throughput over the baseline's; None if the baseline did not run, or the interval says nothing.
        speedup_ci95: Its 95 % interval.
        reasons: Why, in words.
    """

    measured: Measured
    speedup: float | None
    speedup_ci95: tuple[float, float] | None
    reasons: list[str]

    def to_data(self) -> dict[str, Any]:
        """The pick as it stands in `recommended.json`."""
        return point(self.measured) | {
            "speedup": self.speedup,
            "speedup_ci95": list(self.speedup_ci95) if self.speedup_ci95 else None,
            "reasons": self.reasons,
            "script_side_changes": list(self.measured.script_side_changes),
        }


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """What a study found.

    Attributes:
        baseline: The user's own configuration; None if it did not complete.
        front: The measurements that no other one beats on every objective.
        picks: By name; `recommended` and `drop_in` (which keeps the baseline's global batch) first. Empty if no trial
            is usable and passed its checks.
        unchecked: The trials that would be picked if they passed a check that was not made yet.
    """

    baseline: Pick | None
    front: list[Measured]
    picks: dict[str, Pick]
    unchecked: Sequence[Measured] = ()


def point(measured: Measured) -> dict[str, Any]:
    """A measurement as it stands in `front.json`."""
    metrics = {name: value for name in measured.metrics if (value := measured.value(name)) is not None}
    return {
        "trial": measured.trial,
        "candidate": measured.candidate.values(),
        "ds_config": measured.ds_config,
        "metrics": metrics,
        "ci95": {name: list(_interval(measured, name)) for name in metrics if name in measured.ci95},
    }


def _interval(measured: Measured, metric: str) -> tuple[float, float]:
    """The metric's 95 % interval: between re-measurements where there are several, else within the one run."""
    low, high = measured.ci95[metric]
    again = [math.log(round_[metric]) for round_ in measured.repeats.values() if round_.get(metric, 0) > 0]
    if not again:
        return low, high
    own, centre = measured.metrics[metric], math.exp(sum(again) / len(again))
    within = (centre * low / own, centre * high / own) if own > 0 else (low, high)
    seen = [math.exp(value) for value in again]
    return min(within[0], *seen), max(within[1], *seen)


def rank(measured: Sequence[Measured], baseline: Measured | None, objectives: Sequence[Objective]) -> list[Measured]:
    """The usable measurements, best compromise first; those that the user could not reproduce after all others.

    The score is the weighted geometric mean, over the objectives, of the gain over the baseline (over any trial where
    the baseline did not run): free of units, and no objective can be bought with an arbitrary loss in another.
    """
    usable = [m for m in measured if m.usable and all(m.metrics.get(o.metric) is not None for o in objectives)]
    if not usable:
        return []
    reference = baseline or usable[0]
    return sorted(usable, key=lambda m: (bool(m.unreproducible), -log_gain(m, reference, objectives), m.trial))


def finalists(
    measured: Sequence[Measured], baseline: Measured | None, objectives: Sequence[Objective], n: int, world_size: int
) -> list[Measured]:
    """The `n` trials to measure again.

    The best compromise, the best with the baseline's batch and numerics, and the fastest, then the next best. A trial
    that failed a check makes room for the next; the best that passed all its checks is among them. Chosen by first
    measurements alone, so that a resumed study chooses the same.
    """
    measured = [replace(m, repeats={}) for m in measured]
    baseline = replace(baseline, repeats={}) if baseline else None
    ranked = [m for m in rank(measured, baseline, objectives) if baseline is None or m.trial != baseline.trial]
    hopeful = [m for m in ranked if not m.barred]
    # A branch may refute the best one's batch.
    wanted = [*hopeful[:1], *[m for m in hopeful if not m.branch_wanted][:1], *[m for m in hopeful if not m.doubt][:1]]
    if baseline is not None:
        wanted += [m for m in ranked if _drops_in(m, baseline, world_size)][:1]
    wanted += sorted(ranked, key=lambda m: -(m.metrics.get("samples_per_s") or 0.0))[:1]
    unique = {m.trial: m for m in [*wanted, *hopeful]}
    return list(unique.values())[:n]


def in_race(
    found: Sequence[Measured],
    measured: Sequence[Measured],
    baseline: Measured | None,
    objectives: Sequence[Objective],
    world_size: int,
) -> list[Measured]:
    """The finalists that need a further round: those not clearly beaten in every contest.

    A finalist may win as the compromise, as the compromise with the baseline's batch and numerics, or by throughput. It
    is beaten where the best re-measured finalist leads by more than twice the noise.

    Args:
        found: The finalists.
        measured: Every told trial.
        baseline: The user's own configuration, if it completed.
        objectives: What the study optimises.
        world_size: Ranks.
    """
    judge = _Judge(measured, baseline)
    now = {m.trial: m for m in measured if m.trial in {f.trial for f in found}}
    seen = [m for m in now.values() if m.repeats]
    if not seen:
        return list(found)
    reference = baseline or seen[0]

    def gain(m: Measured) -> float:
        return log_gain(m, reference, objectives)

    def throughput(m: Measured) -> float:
        return log_ratio(m, reference, "samples_per_s")

    def hopeful(m: Measured, among: Sequence[Measured], worth: Callable[[Measured], float]) -> bool:
        return m in among and worth(m) >= max(worth(other) for other in among) - CLEARLY * judge.resolution(m)

    same = [m for m in seen if baseline is not None and _drops_in(m, baseline, world_size)]
    contests = ((seen, gain), (same, gain), (seen, throughput))
    left = {m.trial for m in seen if any(hopeful(m, among, worth) for among, worth in contests)}
    return [f for f in found if f.trial in left or not now[f.trial].repeats]


def recommend(
    measured: Sequence[Measured], baseline: Measured | None, objectives: Sequence[Objective], world_size: int
) -> Recommendation:
    """Picks from all measurements; with a baseline, only trials that passed every check they need.

    Args:
        measured: Every told trial, the baseline among them.
        baseline: The user's own configuration, if it completed.
        objectives: What the study optimises.
        world_size: Ranks.
    """
    everything = rank(measured, baseline, objectives)
    ranked = [m for m in everything if not m.unreproducible] or everything
    judge = _Judge(measured, baseline)
    own = judge.pick(baseline, ["the configuration to beat"]) if baseline else None
    if not ranked:
        return Recommendation(baseline=own, front=[], picks={})
    reference = baseline or ranked[0]
    rows = [[improvement(log_ratio(m, reference, o.metric), o.metric) for o in objectives] for m in ranked]
    front = sorted((ranked[i] for i in pareto.front(rows, ["maximize"] * len(objectives))), key=lambda m: m.trial)
    sound = [m for m in ranked if baseline is None or not m.doubt]
    if not sound:
        return Recommendation(baseline=own, front=front, picks={}, unchecked=ranked[:1])
    best, why = _best(sound, baseline, objectives, judge)
    reasons = [why, *words(best, baseline, objectives), *checked(best), *passed_by(ranked[0], best), *drift(baseline)]
    picks = {"recommended": judge.pick(best, reasons)}
    same = [m for m in ranked if baseline is not None and _drops_in(m, baseline, world_size)]
    if baseline is not None and same:
        keeps, _ = _best(same, baseline, objectives, judge)
        batch = baseline.candidate.global_batch_size(world_size)
        why = f"the best {named(objectives)} that keeps the baseline's global batch of {batch} and its numerics"
        picks["drop_in"] = judge.pick(keeps, [why, *words(keeps, baseline, objectives)])
    extremes, unchecked = _extremes(ranked, sound, reference, objectives, judge)
    picks |= extremes
    apart = max(
        (m for m in everything if m.unreproducible and (baseline is None or not m.doubt)),
        key=lambda m: log_gain(m, reference, objectives),
        default=None,
    )
    if apart and (apart in ranked or log_gain(apart, reference, objectives) > log_gain(best, reference, objectives)):
        missing = [f"no flag, constant or line of yours makes this: {text}" for text in apart.unreproducible]
        picks[OUT_OF_REACH] = judge.pick(apart, ["only a trial can run it, so it is ranked apart", *missing])
    return Recommendation(baseline=own, front=front, picks=picks, unchecked=unchecked)


def _extremes(
    ranked: Sequence[Measured],
    sound: Sequence[Measured],
    reference: Measured,
    objectives: Sequence[Objective],
    judge: _Judge,
) -> tuple[dict[str, Pick], list[Measured]]:
    """The best trials by one metric each, and those that would be if they passed their checks."""
    picks: dict[str, Pick] = {}
    unchecked = []
    for name, metric in PICKS.items():
        if metric == GOODPUT and metric not in {o.metric for o in objectives}:
            continue
        told = [m for m in ranked if m.value(metric) is not None and (metric == MEMORY or judge.tells(m))]
        told.sort(key=lambda m: -improvement(log_ratio(m, reference, metric), metric))
        best = next((m for m in told if m in sound), None)
        better = told[: told.index(best)] if best is not None else told
        unchecked += [m for m in better if not m.barred][:1]
        if best is not None:
            why = f"the best {METRICS[metric].label} of all that ran"
            said = [*words(best, judge.baseline, objectives), *checked(best), *passed_by(told[0], best)]
            picks[name] = judge.pick(best, [why, *said])
    return picks, unchecked


def _best(
    ranked: Sequence[Measured], baseline: Measured | None, objectives: Sequence[Objective], judge: _Judge
) -> tuple[Measured, str]:
    """The best of the re-measured trials, if any; of those within 1 % of it the one that changes least.

    Finalists are compared with one another by the rounds that they share: against the baseline, its noise would count
    twice and hide who is ahead. The baseline stays unless the best is ahead of it by more than the noise.
    """
    confirmed = [m for m in ranked if m.repeats] or list(ranked)
    # A trial that left while others went on was clearly beaten in the rounds they shared, however the baseline did in
    # those.
    own = baseline.trial if baseline else None
    rounds = [set(m.repeats) for m in confirmed if m.trial != own]
    confirmed = [m for m in confirmed if m.trial == own or not any(set(m.repeats) < other for other in rounds)]
    lead = {m.trial: sum(log_gain(m, other, objectives) for other in confirmed) for m in confirmed}
    top = max(confirmed, key=lambda m: lead[m.trial])
    behind = {m.trial: log_gain(top, m, objectives) for m in confirmed}
    alike = [
        m for m in confirmed if behind[m.trial] <= TIE or (m.trial == own and behind[own] <= judge.resolution(top))
    ]
    chosen = min(alike, key=lambda m: (len(changes(m.candidate, baseline)), behind[m.trial]))
    gain = math.exp(log_gain(chosen, baseline or top, objectives))
    why = f"the best {named(objectives)} ({'geometric mean of the gains: ' if len(objectives) > 1 else ''}{gain:.2f}x)"
    tied = [m for m in confirmed if m is not chosen and abs(log_gain(m, chosen, objectives)) <= judge.resolution(m)]
    if tied:
        why += f"; not to be told from {', '.join(f'trial {m.trial}' for m in tied)} within the noise"
    return chosen, why


def spread(measured: Sequence[Measured], baseline: Measured | None) -> float:
    """Standard deviation of one log ratio of throughputs between re-measurement rounds, pooled over the finalists."""
    return _Judge(measured, baseline).spread


class _Judge:
    """Compares with the baseline, knowing how much two runs of one configuration differ."""

    def __init__(self, measured: Sequence[Measured], baseline: Measured | None) -> None:
        self.baseline = baseline
        pairs = [
            paired_log_ratios(m, baseline, "samples_per_s") for m in measured if baseline and m.trial != baseline.trial
        ]
        residuals = [value - sum(values) / len(values) for values in pairs if len(values) > 1 for value in values]
        self.degrees = sum(len(values) - 1 for values in pairs if len(values) > 1)
        self.spread = (
            math.sqrt(sum(r * r for r in residuals) / self.degrees) if self.degrees else ASSUMED_SPREAD * math.sqrt(2)
        )
        # What was measured once only is compared across time; how much that costs, the configurations measured again
        # tell.
        shifts = [_shift(m, "samples_per_s") for m in measured if m.repeats]
        across = step_times.t95(len(shifts)) * math.sqrt(sum(s * s for s in shifts) / len(shifts)) if shifts else 0.0
        self.reach_across = max(across, 1.96 * self.spread)

    def resolution(self, measured: Measured) -> float:
        """Differences of log gain below this are noise."""
        n = max(1, len(measured.repeats))
        return step_times.t95(self.degrees or 30) * self.spread / math.sqrt(n) if n > 1 else 1.96 * self.spread

    def tells(self, measured: Measured) -> bool:
        """Whether the throughput can be compared with the baseline's, if there is one."""
        return self.baseline is None or self.speedup(measured)[0] is not None

    def pick(self, measured: Measured, reasons: list[str]) -> Pick:
        """A pick with its speed-up."""
        speedup, interval = self.speedup(measured)
        if self.baseline is not None and speedup is None:
            reasons = [
                *reasons,
                "its throughput cannot be compared with the baseline's: the machine's speed varies too much",
            ]
        return Pick(measured=measured, speedup=speedup, speedup_ci95=interval, reasons=reasons)

    def speedup(self, measured: Measured) -> tuple[float | None, tuple[float, float] | None]:
        """Throughput over the baseline's with its interval, from paired rounds where there are any; None if unknown."""
        if self.baseline is None:
            return None, None
        if measured.trial == self.baseline.trial:
            return 1.0, (1.0, 1.0)
        pairs = paired_log_ratios(measured, self.baseline, "samples_per_s")
        if pairs:
            ratio, (low, high) = step_times.ratio_ci95(pairs, self.spread, self.degrees or 30)
        elif measured.metrics.get("samples_per_s") and self.baseline.metrics.get("samples_per_s"):
            ratio = math.exp(log_ratio(measured, self.baseline, "samples_per_s"))
            within = [_relative_half_width(m, "samples_per_s") for m in (measured, self.baseline)]
            reach = math.hypot(*within, self.reach_across)
            low, high = ratio * math.exp(-reach), ratio * math.exp(reach)
        else:
            return None, None
        return (ratio, (low, high)) if high <= WIDEST * low else (None, None)


def _shift(measured: Measured, metric: str) -> float:
    """Logarithm of a metric's re-measurements over the first measurement."""
    now, then = measured.value(metric), measured.metrics.get(metric)
    return math.log(now / then) if now and then else 0.0


def _drops_in(measured: Measured, baseline: Measured, world_size: int) -> bool:
    """Whether it trains to the same end as the baseline: the same global batch, the same numerics."""
    batch, own = (m.candidate.global_batch_size(world_size) for m in (measured, baseline))
    return measured.numerics_kept and batch == own


def _relative_half_width(measured: Measured, metric: str) -> float:
    low, high = measured.ci95.get(metric, (0.0, 0.0))
    value = measured.metrics.get(metric, 0.0)
    return (high - low) / 2 / value if value > 0 else 0.0
