"""What the search knows besides the next candidate: what surely does not fit, when nothing is left to gain, which trial is lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.analysis.recommend import Measured
from autotune.candidate import Candidate
from autotune.gate import numerics
from autotune.objective import GOODPUT, METRICS
from autotune.search.guide import Guide, Left, Outlook, chance_needed
from autotune.search.learned import Told
from autotune.trial import Rival

Floats = NDArray[np.float64]
# Two runs of one configuration differ by a few per cent: a rival must be better by more.
RIVAL_MARGIN = 1.05
MOST_RIVALS = 32
INTERVAL = 1.645


def unfit(guide: Guide, told: Sequence[Told], candidate: Candidate) -> str | None:
    """Why a candidate is not worth a trial, which would run out of memory; None where it may fit.

    What nearly fits is run all the same while the interval says that it may, and no such trial was lost before.
    """
    if guide.limit is None:
        return None
    believed = guide.beliefs(told, [candidate])
    if not believed.sized or believed.fits[0] >= chance_needed(told):
        return None
    mean, sd = float(believed.log_memory[0][0]), float(believed.log_memory[1][0])
    low, high = (math.exp(mean + sign * INTERVAL * sd) for sign in (-1, 1))
    return f"predicted to need {size(math.exp(mean))} ({size(low)} to {size(high)}); a rank has {size(math.exp(guide.limit))}"


def nothing_left(left: Left, limit: float | None) -> str:
    """Why the search has nothing to propose any more."""
    if left.n_open and limit is not None and left.least_memory_bytes is not None:
        return (
            f"no remaining candidate fits the device memory of {size(math.exp(limit))}: of {left.n_open:,} that were not run"
            f" the smallest is predicted to need {size(left.least_memory_bytes)}"
        )
    return "every candidate that can run here has been measured"


def settled(guide: Guide, told: Sequence[Told], busy: Sequence[Candidate], below: float) -> str | None:
    """Why the study may end before its budget does; None if something may still be gained.

    Two looks in a row must say so, the one at all trials and the one before the last.
    """
    if below <= 0:
        return None
    now = guide.outlook(told, busy)
    if not now.settled(below) or not guide.outlook(told[:-1], busy).settled(below):
        return None
    return f"no candidate is expected to improve an objective by {below:.2g} or more ({_gains(now)})"


def _gains(outlook: Outlook) -> str:
    words = [f"{METRICS[metric].label} by {gain:.1%}" for metric, gain in outlook.gains.items()]
    if len(outlook.gains) > 1:
        words.append(f"the front's hypervolume by {outlook.hypervolume:.1%}")
    return ", ".join(words)


def rivals(
    guide: Guide,
    told: Sequence[Told],
    candidate: Candidate,
    measured: Sequence[Measured],
    baseline: Candidate,
) -> tuple[Rival, ...]:
    """Whom a trial of the candidate is compared with while it runs; empty where an objective cannot be foretold from its steps.

    A candidate with the baseline's global batch and numerics may be the drop-in pick, so only such ones are its rivals; one with
    its batch alone needs no branch, so only such are rivals of that.
    """
    world, batch = guide.world_size, candidate.global_batch_size(guide.world_size)
    usable = [m for m in measured if m.usable and m.candidate != candidate]
    if batch == baseline.global_batch_size(world):
        usable = [m for m in usable if m.candidate.global_batch_size(world) == batch]
        if numerics(candidate.to_deepspeed()) == numerics(baseline.to_deepspeed()):
            usable = [m for m in usable if m.numerics_kept]
    if not usable or any(metric not in _STEP_TIME_FOR and metric != "peak_memory_bytes" for metric in guide.metrics):
        return ()
    believed = guide.beliefs(told, [candidate])
    hoped = _Hoped(batch, *(_low(*values) for values in (believed.log_samples, believed.log_useful)))
    found = [rival for m in usable if (rival := _rival(m, guide.metrics, hoped)) is not None]
    found.sort(key=lambda rival: (rival.step_time_s, rival.peak_memory_bytes or 0.0))
    needed: list[Rival] = []
    for rival in found:  # one that is easier to lose against in both ways says all that the other says
        if not needed or (rival.peak_memory_bytes or 0.0) < min(other.peak_memory_bytes or 0.0 for other in needed):
            needed.append(rival)
    return tuple(needed[:MOST_RIVALS])


@dataclass(frozen=True)
class _Hoped:
    """A candidate's global batch, and the fewest samples that it may need: to the target, and for one that is useful."""

    batch: int
    to_target: float
    for_useful: float


def _low(mean: Floats, sd: Floats) -> float:
    return math.exp(min(float(mean[0]) - 2 * float(sd[0]), 700.0))


def _rival(measured: Measured, metrics: Sequence[str], hoped: _Hoped) -> Rival | None:
    step_time_s, peak = 0.0, None
    for metric in metrics:
        value = measured.metrics.get(metric)
        if value is None or not value > 0:
            return None
        if metric == "peak_memory_bytes":
            peak = value
        else:
            step_time_s = max(step_time_s, _STEP_TIME_FOR[metric](measured.metrics, hoped))
    if not math.isfinite(step_time_s):
        return None
    return Rival(trial=measured.trial, step_time_s=step_time_s * RIVAL_MARGIN, peak_memory_bytes=peak)


def _tokens_step_time(metrics: Mapping[str, float], hoped: _Hoped) -> float:
    tokens = metrics["tokens_per_s"] / metrics["samples_per_s"] if metrics.get("samples_per_s") else math.inf
    return tokens * hoped.batch / metrics["tokens_per_s"]


# The step time at which a trial is only as good as what was measured, by objective.
_STEP_TIME_FOR: dict[str, Callable[[Mapping[str, float], _Hoped], float]] = {
    "step_time_s": lambda metrics, _: metrics["step_time_s"],
    "samples_per_s": lambda metrics, hoped: hoped.batch / metrics["samples_per_s"],
    "tokens_per_s": _tokens_step_time,
    "time_to_loss_s": lambda metrics, hoped: (
        metrics["time_to_loss_s"] * hoped.batch / hoped.to_target if hoped.to_target else math.inf
    ),
    GOODPUT: lambda metrics, hoped: (
        hoped.batch / (metrics[GOODPUT] * hoped.for_useful) if hoped.for_useful else math.inf
    ),
}


def size(n_bytes: float) -> str:
    """Bytes for people."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.3g} {unit}"
    return f"{n_bytes / 2**10:.3g} KiB"
