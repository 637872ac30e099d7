"""Sentences that justify a recommendation: knobs changed, gains, checks, a better trial not picked, drift."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autotune.scoring.measured import Measured, improvement, log_ratio
from autotune.scoring.metrics import GOODPUT, METRICS
from autotune.scoring.objective import Objective
from autotune.space.candidate import Candidate, differing

# From this change of the machine's speed between first trial and re-measurement on, the reasons mention it: 10 %.
DRIFT = 0.1


def named(objectives: Sequence[Objective]) -> str:
    """What is best by the objectives: `throughput`, or `compromise of step time and throughput`."""
    *first, last = [METRICS[o.metric].label for o in objectives]
    return f"compromise of {', '.join(first)} and {last}" if first else last


def changes(candidate: Candidate, baseline: Measured | None) -> list[str]:
    """The knobs in which a candidate differs from the baseline, in words."""
    if baseline is None:
        return []
    before, after = baseline.candidate.values(), candidate.values()
    return [
        f"{name} {_said(after.get(name))} instead of {_said(before.get(name))}" for name in differing(before, after)
    ]


def _said(value: Any) -> str:
    return "default" if value is None else str(value)


def words(measured: Measured, baseline: Measured | None, objectives: Sequence[Objective]) -> list[str]:
    """The changes of a trial, and its gains over the baseline."""
    if baseline is None:
        return ["the baseline did not run, so there is no speed-up to state"]
    if measured.trial == baseline.trial:
        return ["this is the baseline: no other trial is measurably better"]
    found = changes(measured.candidate, baseline)
    gains = []
    for objective in objectives:
        gain = math.exp(improvement(log_ratio(measured, baseline, objective.metric), objective.metric))
        better = gain if gain >= 1 else 1 / gain
        read = _time_to_target(measured, baseline) if objective.metric == GOODPUT else ""
        gains.append(f"{METRICS[objective.metric].label} {better:.2f}x {'better' if gain >= 1 else 'worse'}{read}")
    return [*([f"changes {', '.join(found)}"] if found else []), f"against the baseline: {', '.join(gains)}"]


def _time_to_target(measured: Measured, baseline: Measured) -> str:
    """Goodput read as the time to any target, relative to the baseline's, with its interval."""
    own, base = measured.ci95.get(GOODPUT), baseline.ci95.get(GOODPUT)
    if own is None or base is None or not min(*own, *base) > 0:
        return ""
    ratio = math.exp(-log_ratio(measured, baseline, GOODPUT))
    # The intervals in the order of one run; re-measurement moves the middle.
    spread = math.hypot(math.log(own[1] / own[0]), math.log(base[1] / base[0])) / 2
    low, high = ratio * math.exp(-spread), ratio * math.exp(spread)
    return f" (a target in {ratio:.2f}x the baseline's time, {low:.2f} to {high:.2f})"


def checked(measured: Measured) -> list[str]:
    """The outcome of its checks, if its numbers or its global batch differ from the baseline's."""
    verdict, branch = measured.verdict, measured.branch
    if measured.doubt:
        return [f"not to be recommended: {measured.doubt}"]
    said = [branch.reason] if branch is not None and measured.branch_wanted else []
    if measured.numerics_kept or verdict is None:
        return said
    whose = (
        "its loss" if verdict.same_as is None else f"the loss of trial {verdict.same_as}, whose numerics are the same,"
    )
    return [
        *said,
        f"trains as the baseline's numerics do at its global batch: over {verdict.n_steps} steps {whose} is"
        f" {abs(verdict.excess):.2g} {'above' if verdict.excess > 0 else 'below'} theirs, and up to {verdict.limit:.2g}"
        " above is chance",
    ]


def passed_by(first: Measured, best: Measured) -> list[str]:
    """A better trial, and the reason that it is not picked."""
    return [f"trial {first.trial} reads better, but {first.doubt}"] if first.doubt and first.trial != best.trial else []


def drift(baseline: Measured | None) -> list[str]:
    """A caution if the machine's speed changed during the study: ratios hold, absolute times do not."""
    if baseline is None or not baseline.repeats:
        return []
    now, then = baseline.value("step_time_s"), baseline.metrics.get("step_time_s")
    if not now or not then or abs(math.log(now / then)) < DRIFT:
        return []
    word = "slower" if now > then else "faster"
    return [
        f"caution: this machine ran the baseline {max(now / then, then / now):.2f}x {word} at the end of the study than"
        " at its start"
    ]
