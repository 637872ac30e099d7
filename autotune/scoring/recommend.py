"""From measurements to a recommendation: the front, the picks, their speed-ups, and the reasons in words."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.scoring import pareto
from autotune.scoring.estimates import READS_BETTER, WITHIN_NOISE, Estimates
from autotune.scoring.measured import Measured, improvement, log_gain, log_ratio
from autotune.scoring.metrics import GOODPUT, METRICS
from autotune.scoring.objective import Objective
from autotune.scoring.reasons import KEPT, checked, drift, kept, named, once, passed_by, words
from autotune.space.candidate import differing
from autotune.trial.result import Outcome

# Trials whose estimated gains differ by less than this are alike: recommended is one that keeps the numerics, and of these
# the one that changes least. Half of the 1 % that it may cost, since the estimates are not exact.
TIE = 0.005
# Name of the pick for the best trial that only a trial can run, where it beats those that the user can.
OUT_OF_REACH = "out_of_reach"
MEMORY = "peak_memory_bytes"
# Peaks of memory that differ by less than this share are the same: no device has room for one and not for the other.
SAME_MEMORY = 0.01
PICKS: dict[str, str] = {
    "lowest_latency": "step_time_s",
    "highest_throughput": "samples_per_s",
    "fastest_convergence": GOODPUT,
    "lowest_memory": MEMORY,
}


@dataclass(frozen=True, kw_only=True)
class Pick:
    """A configuration that is recommended.

    Attributes:
        measured: The recommended trial.
        estimates: The study's estimates, from all measurements.
        first: The trial that measures best by the pick's metric; it may not have passed its checks. None where the
            configuration is not picked by one metric.
    """

    measured: Measured
    estimates: Estimates
    reasons: list[str]
    first: Measured | None = None

    def to_data(self) -> dict[str, Any]:
        """The pick as it stands in `recommended.json`."""
        more = {"reasons": self.reasons, "script_side_changes": list(self.measured.script_side_changes)}
        return point(self.measured, self.estimates) | more | {"unchecked": self.measured.doubt}


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


def pick_name(said: str) -> str:
    """The name of a pick in files, however it was written: the answer says `drop-in` and `lowest latency`."""
    return said.strip().lower().replace("-", "_").replace(" ", "_")


def point(measured: Measured, estimates: Estimates) -> dict[str, Any]:
    """A trial as it stands in `front.json`: its estimates."""
    return {
        "trial": measured.trial, "candidate": measured.candidate.values(), "ds_config": measured.ds_config
    } | figures(measured, estimates)  # fmt: skip


def figures(measured: Measured, estimates: Estimates) -> dict[str, Any]:
    """The estimates of a trial as they stand in every file, with their 95 % intervals.

    `gains` are over the baseline, by metric: factor and both ends; `luck` lists those that the best of as many equal trials would
    read, too, though their own interval does not hold 1. `measurements` counts the trial and its
    re-measurements. `doubt` says why the trial must not be recommended, empty if nothing is left open; `barred` whether a check
    has been made that it did not pass.
    """
    speedup, gains = estimates.speedup(measured), estimates.gains(measured)
    return {
        "metrics": dict(measured.metrics),
        "ci95": {name: list(ends) for name, ends in measured.ci95.items()},
        "gains": {name: list(gain) for name, gain in gains.items()},
        "luck": [name for name, gain in gains.items() if gain.told and not estimates.told(measured, name)],
        "speedup": speedup.factor if speedup else None,
        "speedup_ci95": [speedup.low, speedup.high] if speedup else None,
        "measurements": 1 + len(measured.repeats),
        "doubt": "" if _sound(measured, estimates.baseline) else measured.doubt,
        "barred": measured.barred,
    }


def rank(estimates: Estimates, objectives: Sequence[Objective]) -> list[Measured]:
    """The usable trials, best compromise first; those that the user could not reproduce after all others.

    The score is the weighted geometric mean, over the objectives, of the gain over the baseline (over any trial where
    the baseline did not run): free of units, and no objective can be bought with an arbitrary loss in another.
    """
    usable = [m for m in estimates.measured if m.usable and all(m.metrics.get(o.metric) for o in objectives)]
    if not usable:
        return []
    reference = estimates.baseline or usable[0]
    return sorted(usable, key=lambda m: (bool(m.unreproducible), -log_gain(m, reference, objectives), m.trial))


def finalists(estimates: Estimates, objectives: Sequence[Objective], n: int, world_size: int) -> list[Measured]:
    """The `n` trials to check and to measure again first.

    The best compromise, the best with the baseline's batch and numerics, and the fastest, then the next best. A trial
    that failed a check makes room for the next; the best that passed all its checks is among them.

    Args:
        estimates: From first measurements alone, so that a resumed study chooses the same.
    """
    baseline = estimates.baseline
    ranked = [m for m in rank(estimates, objectives) if baseline is None or m.trial != baseline.trial]
    hopeful = [m for m in ranked if not m.barred]
    # A branch may refute the best one's batch.
    wanted = [*hopeful[:1], *[m for m in hopeful if not m.branch_wanted][:1], *[m for m in hopeful if not m.doubt][:1]]
    if baseline is not None:
        wanted += [m for m in hopeful if drops_in(m, baseline, world_size)][:1]
    wanted += sorted(hopeful, key=lambda m: -(m.metrics.get("samples_per_s") or 0.0))[:1]
    unique = {m.trial: m for m in [*wanted, *hopeful]}
    return list(unique.values())[:n]


def recommend(estimates: Estimates, objectives: Sequence[Objective], world_size: int) -> Recommendation:
    """Picks from all measurements, of the trials that passed every check they need; without a baseline those that take none.

    Args:
        estimates: What all measurements say of every told trial.
    """
    baseline, everything = estimates.baseline, rank(estimates, objectives)
    ranked = [m for m in everything if not m.unreproducible]
    ranked = ranked if any(_sound(m, baseline) for m in ranked) else everything
    own = Pick(measured=baseline, estimates=estimates, reasons=["the configuration to beat"]) if baseline else None
    if not ranked:
        return Recommendation(baseline=own, front=[], picks={})
    reference = baseline or ranked[0]
    rows = [[improvement(log_ratio(m, reference, o.metric), o.metric) for o in objectives] for m in ranked]
    front = sorted((ranked[i] for i in pareto.front(rows)), key=lambda m: m.trial)
    sound = [m for m in ranked if _sound(m, baseline)]
    if not sound:
        return Recommendation(baseline=own, front=front, picks={}, unchecked=ranked[:1])
    best, why = _best(sound, estimates, objectives)
    said = [] if best is baseline else words(best, estimates, objectives)
    reasons = [why, *said, *checked(best), *passed_by(ranked[0], best)]
    if best.confirmed and not sound[0].confirmed and log_gain(sound[0], best, objectives) > TIE:
        reasons.append(f"trial {sound[0].trial} reads better, but {once(sound[0])}")
    picks = {"recommended": _pick(best, estimates, [*reasons, *drift(estimates)])}
    same = [m for m in sound if baseline is not None and drops_in(m, baseline, world_size)]
    if baseline is not None and same:
        keeps, _ = _best(same, estimates, objectives)
        batch = baseline.candidate.global_batch_size(world_size)
        keeping = f"keeps the baseline's global batch of {batch} and its numerics"
        tried = any(drops_in(m, baseline, world_size) for m in estimates.measured if m.trial != baseline.trial)
        why = f"the best {named(objectives)} that {keeping}" if tried else f"no other one that {keeping} was tried"
        picks["drop_in"] = _pick(keeps, estimates, [why, *words(keeps, estimates, objectives)])
    extremes, unchecked = _extremes(ranked, sound, estimates, objectives)
    picks |= extremes
    picks["recommended"].reasons.extend(_better_by_one(best, extremes, known=ranked[0]))
    apart = max(
        (m for m in everything if m.unreproducible and _sound(m, baseline)),
        key=lambda m: log_gain(m, reference, objectives),
        default=None,
    )
    if apart and (apart in ranked or log_gain(apart, reference, objectives) > log_gain(best, reference, objectives)):
        missing = [f"no flag, constant or line of yours makes this: {text}" for text in apart.unreproducible]
        picks[OUT_OF_REACH] = _pick(apart, estimates, ["only a trial can run it, so it is ranked apart", *missing])
    return Recommendation(baseline=own, front=front, picks=picks, unchecked=unchecked)


def _sound(measured: Measured, baseline: Measured | None) -> bool:
    """Whether nothing speaks against a trial; where no baseline ran, the checks that compare with it are not asked for."""
    return not (measured.doubt if baseline is not None else measured.unwitnessed or measured.unfit)


def _pick(measured: Measured, estimates: Estimates, reasons: Sequence[str]) -> Pick:
    """A pick, with what its reader has to know of its figures."""
    found, baseline = list(reasons), estimates.baseline
    if baseline is not None and estimates.speedup(measured) is None:
        found.append("its throughput cannot be compared with the baseline's: the machine's speed varies too much")
    if not measured.confirmed and measured is not baseline:
        found.append(f"unconfirmed: {once(measured)}")
    return Pick(measured=measured, estimates=estimates, reasons=found)


def _extremes(
    ranked: Sequence[Measured], sound: Sequence[Measured], estimates: Estimates, objectives: Sequence[Objective]
) -> tuple[dict[str, Pick], list[Measured]]:
    """The best trials by one metric each, and those that would be if they passed their checks."""
    picks: dict[str, Pick] = {}
    unchecked, passed = [], {m.trial for m in sound}
    # Those whose throughput can be compared with the baseline's, if there is one.
    compared = [m for m in ranked if estimates.baseline is None or estimates.speedup(m)]
    for name, metric in PICKS.items():
        if metric == GOODPUT and metric not in {o.metric for o in objectives}:
            continue
        told = [m for m in (ranked if metric == MEMORY else compared) if m.metrics.get(metric)]
        if not told:
            continue
        told.sort(key=lambda m: (-improvement(log_ratio(m, ranked[0], metric), metric), m is not estimates.baseline))
        if metric == MEMORY:
            told = _least_memory_first(told, estimates, objectives)
        best = next((m for m in told if m.trial in passed), None)
        unchecked += [m for m in (told[: told.index(best)] if best is not None else told) if not m.barred][:1]
        if best is not None:
            best = _confirmed(best, sound, estimates, metric)
            ran = [m for m in estimates.measured if m.outcome is Outcome.COMPLETE and m.metrics.get(metric)]
            least = SAME_MEMORY if metric == MEMORY else 0.0
            by = {m.trial: improvement(log_ratio(m, best, metric), metric) for m in ran}
            ahead = [m for m in ran if by[m.trial] > least]
            within = f" within {100 * least:g} %" if any(0 < gain <= least for gain in by.values()) else ""
            vague = {m.trial for m in ahead if m.trial in passed and metric != MEMORY and m not in compared}
            if vague and best is estimates.baseline:  # it is no best: how far it is behind cannot be told
                continue
            of = ["keep the constraints and passed their checks"] if any(m.trial not in passed for m in ahead) else []
            of += ["can be compared with the baseline"] if vague else []
            # `_confirmed` passed by one that was not.
            of += ["were measured again"] if any(m.trial in passed - vague for m in ahead) else []
            why = f"the best {METRICS[metric].label}{within} of all that {' and '.join(of) or 'ran'}"
            said = [*words(best, estimates, objectives), *checked(best), *passed_by(told[0], best)]
            picks[name] = replace(_pick(best, estimates, [why, *said]), first=told[0])
    return picks, unchecked


def _least_memory_first(
    told: Sequence[Measured], estimates: Estimates, objectives: Sequence[Objective]
) -> list[Measured]:
    """Trials that are sorted by memory; of those with as little as the first, the baseline leads, then the best compromise."""
    n_same = sum(improvement(log_ratio(told[0], m, MEMORY), MEMORY) < SAME_MEMORY for m in told)
    same = sorted(told[:n_same], key=lambda m: (m is not estimates.baseline, -log_gain(m, told[0], objectives)))
    return [*same, *told[n_same:]]


def _better_by_one(best: Measured, extremes: Mapping[str, Pick], known: Measured) -> list[str]:
    """The trials that would be picked in place of the recommended one by one metric, and why they are not."""
    better: dict[int, tuple[Measured, list[str]]] = {}
    for name, pick in extremes.items():
        if pick.first is not None and pick.measured.trial == best.trial and pick.first.trial != known.trial:
            better.setdefault(pick.first.trial, (pick.first, []))[1].append(METRICS[PICKS[name]].label)
    return [text for first, labels in better.values() for text in passed_by(first, best, " and ".join(labels))]


def _confirmed(best: Measured, sound: Sequence[Measured], estimates: Estimates, metric: str) -> Measured:
    """The best by a metric; of those that cannot be told from it one that was measured again, where it was not.

    The baseline need not have been: a round may be cut before its turn.
    """
    settled = [m for m in sound if m.confirmed or m is estimates.baseline]
    if best in settled or not any(m.confirmed for m in settled):
        return best
    gains = {m.trial: estimates.gain(m, best, metric) for m in settled}
    alike = [m for m in settled if (gain := gains.get(m.trial)) is not None and not gain.told]
    return max(alike, key=lambda m: improvement(log_ratio(m, best, metric), metric), default=best)


def _best(ranked: Sequence[Measured], estimates: Estimates, objectives: Sequence[Objective]) -> tuple[Measured, str]:
    """The best of the trials that were measured again, if any; of those within `TIE` of it the one that changes least.

    The baseline stays unless another one is shown to be better, measured again or not: a round may be cut before its turn.
    """
    baseline = estimates.baseline
    # That the baseline was measured again says nothing of the others.
    number = baseline.trial if baseline is not None else None
    again = any(m.confirmed and m.trial != number for m in ranked)
    confirmed = [m for m in ranked if m.confirmed or m.trial == number] if again else list(ranked)
    # What reads best may have been measured less often than what is shown to be better, or is as good as that.
    compared = baseline is not None and baseline in confirmed
    shown = [m for m in confirmed if not compared or m is baseline or shown_better(m, estimates, objectives)]
    top = max(shown, key=lambda m: log_gain(m, shown[0], objectives))
    behind = {m.trial: log_gain(top, m, objectives) for m in shown}
    alike = [m for m in shown if behind[m.trial] <= TIE]
    own = baseline.candidate.values() if baseline else {}
    n_changes = {m.trial: len(differing(m.candidate.values(), own)) if baseline else 0 for m in alike}
    # Other numerics that passed their check are still a risk, and half a percent does not pay for it.
    chosen = min(alike, key=lambda m: (not m.numerics_kept, n_changes[m.trial], behind[m.trial]))
    why = f"the best {named(objectives)}"
    if chosen is baseline:
        why = f"the baseline: {kept(sum(bool(m.metrics) for m in estimates.measured))}"
        why += f" by the {named(objectives)}" * (len(objectives) > 1 and why.endswith(KEPT))
        reads = max(confirmed, key=lambda m: log_gain(m, chosen, objectives))
        if not tied(reads, chosen, estimates, objectives) and goal_gain(reads, chosen, estimates, objectives) is None:
            why += f"; whether trial {reads.trial} is better cannot be told: the machine's speed varies too much"
    elif baseline is not None:
        mean = "weighted geometric mean" if len({o.weight for o in objectives}) > 1 else "geometric mean"
        if (gain := goal_gain(chosen, baseline, estimates, objectives)) is not None:
            why += f" ({f'{mean} of the gains: ' if len(objectives) > 1 else ''}{gain:.2f}x)"
    others = [m for m in confirmed if m is not chosen and tied(m, chosen, estimates, objectives)]
    if others:
        why += f"; {WITHIN_NOISE} of {', '.join(f'trial {m.trial}' for m in others)}"
        if any(
            abs(log_gain(m, chosen, objectives)) > estimates.reach(m, chosen, objectives, alone=True) for m in others
        ):
            why += f" (the best of {estimates.n_looked_at} trials {READS_BETTER})"  # though its own interval does not hold 1
    return chosen, why


def goal_gain(
    measured: Measured, baseline: Measured, estimates: Estimates, objectives: Sequence[Objective]
) -> float | None:
    """The factor by which a trial is better than the baseline by the objectives; None where an interval of them says nothing."""
    gains = [estimates.gain(measured, baseline, o.metric) for o in objectives]
    vague = any(gain is not None and gain.vague for gain in gains)
    return None if vague else math.exp(log_gain(measured, baseline, objectives))


def shown_better(measured: Measured, estimates: Estimates, objectives: Sequence[Objective]) -> bool:
    """Whether a trial is a better compromise than the baseline beyond noise, by a factor that can be stated.

    Readings that scatter more than that scatter in ways that the interval does not know.
    """
    assert estimates.baseline is not None
    gain = log_gain(measured, estimates.baseline, objectives)
    stated = goal_gain(measured, estimates.baseline, estimates, objectives) is not None
    return stated and gain > estimates.reach(measured, estimates.baseline, objectives)


def tied(one: Measured, other: Measured, estimates: Estimates, objectives: Sequence[Objective]) -> bool:
    """Whether two trials' compromises cannot be told apart."""
    return abs(log_gain(one, other, objectives)) <= estimates.reach(one, other, objectives)


def drops_in(measured: Measured, baseline: Measured, world_size: int) -> bool:
    """Whether it trains to the same end as the baseline: the same global batch, the same numerics."""
    batch, own = (m.candidate.global_batch_size(world_size) for m in (measured, baseline))
    return measured.numerics_kept and batch == own
