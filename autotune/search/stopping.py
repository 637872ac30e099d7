"""Reasons why the search would not run a candidate, has nothing left to propose, or may stop early."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune.scoring.quantiles import Z90
from autotune.search.observation import Observation
from autotune.search.optimizer import HOPELESS, CandidateOptimizer, RemainingCandidates, chance_needed
from autotune.space.candidate import Candidate
from autotune.system.units import format_bytes


def unfit(guide: CandidateOptimizer, told: Sequence[Observation], candidate: Candidate) -> str | None:
    """Why a candidate is not worth a trial, which would run out of memory; None where it may fit.

    A candidate that may just fit is run; each trial that ran out of memory makes this stricter.
    """
    if guide.limit is None:
        return None
    believed = guide.beliefs(told, [candidate])
    if not believed.sized or believed.fits[0] >= chance_needed(told):
        return None
    mean, sd = float(believed.log_memory[0][0]), float(believed.log_memory[1][0])
    low, high = (math.exp(mean + sign * Z90 * sd) for sign in (-1, 1))
    needed = f"{format_bytes(math.exp(mean))} ({format_bytes(low)} to {format_bytes(high)})"
    return f"predicted to need {needed}; a rank has {format_bytes(math.exp(guide.limit))}"


def nothing_left(left: RemainingCandidates, limit: float | None) -> str:
    """Why the search has nothing to propose any more."""
    if left.n_fit:
        return f"all that was not run ({left.n_open:,} candidates) is expected to be over {HOPELESS:.0f} times slower than the best"
    if left.n_open and limit is not None and left.least_memory_bytes is not None:
        return (
            f"no remaining candidate fits the device memory of {format_bytes(math.exp(limit))}: of {left.n_open:,} that were not run"
            f" the smallest is predicted to need {format_bytes(left.least_memory_bytes)}"
        )
    return "every candidate that can run here has been measured"


def settled(
    guide: CandidateOptimizer, told: Sequence[Observation], busy: Sequence[Candidate], below: float
) -> str | None:
    """Why the study may end before its budget does; None if something may still be gained.

    Both with and without the last trial, little may be lost by it; a quick study does not wait for that.
    """
    if below <= 0:
        return None
    now = guide.outlook(told, busy)
    if not now.settled(below) or not (guide.quick or guide.outlook(told[:-1], busy).settled(below)):
        return None
    if now.loss < below:
        return f"more trials are expected to improve the answer by {now.loss:.1%}, less than {100 * below:.3g}% (--stop-below)"
    return (
        f"no further trial is expected to improve the answer by more than {now.next_gain:.2%} (all of them together by"
        f" {now.loss:.1%})"
    )
