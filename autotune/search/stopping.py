"""When to stop: why a candidate is not run, what a running trial must be able to beat, and why a study may end."""

import math
from collections.abc import Mapping, Sequence

from autotune.scoring.measured import Measured
from autotune.scoring.metrics import GOODPUT, of_kind
from autotune.scoring.quantiles import Z90, Z95
from autotune.search.model import MEMORY
from autotune.search.observation import Observation
from autotune.search.optimizer import HOPELESS, CandidateOptimizer, RemainingCandidates, chance_needed
from autotune.space.candidate import Candidate
from autotune.space.space import EXHAUSTED
from autotune.system.units import format_bytes
from autotune.trial.profile import Floats
from autotune.trial.request import TrialToBeat

# Two runs of one configuration differ by a few per cent, by as much as the interval of the rival's own reading says, and by
# what 95 % of two readings of this study differ by: a rival must be better by more, within these factors.
RIVAL_MARGIN, WIDEST_MARGIN = 1.05, 1.5
MOST_RIVALS = 32
# What a search says that has nothing to propose although candidates are left.
ALL_SLOW, NONE_FITS = "all that was not run", "no remaining candidate fits"


def unfit(guide: CandidateOptimizer, told: Sequence[Observation], candidate: Candidate) -> str | None:
    """Why a candidate is not worth a trial, which would run out of memory; None where it may fit.

    A candidate that may just fit is run; each trial that ran out of memory makes this stricter.
    """
    if guide.limit is None:
        return None
    believed = guide.beliefs(told, [candidate])
    if not believed.model.sized or believed.fits[0] >= chance_needed(told):
        return None
    mean, sd = float(believed.log_memory[0][0]), float(believed.log_memory[1][0])
    low, high = (math.exp(mean + sign * Z90 * sd) for sign in (-1, 1))
    needed = f"{format_bytes(math.exp(mean))} ({format_bytes(low)} to {format_bytes(high)})"
    return f"predicted to need {needed}; a rank has {format_bytes(math.exp(guide.limit))}"


def nothing_left(left: RemainingCandidates, limit: float | None) -> str:
    """Why the search has nothing to propose any more."""
    if left.n_fit:
        slow = (
            f"{ALL_SLOW} ({left.n_open:,} candidates) is expected to be over {HOPELESS:.0f} times slower than the best"
        )
        return slow + (", or not to fit the device memory" if left.n_fit < left.n_open else "")
    if left.n_open and limit is not None and left.least_memory_bytes is not None:
        return (
            f"{NONE_FITS} the device memory of {format_bytes(math.exp(limit))}: of {left.n_open:,} that were not run"
            f" the smallest is predicted to need {format_bytes(left.least_memory_bytes)}"
        )
    return EXHAUSTED


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
        gain = f"{math.floor(1e4 * now.loss) / 1e4:.2%}"  # not rounded up, as that might read as the limit itself
        return f"more trials are expected to improve the answer by {gain}, less than {100 * below:.3g}% (stop_below)"
    return (
        f"no further trial is expected to improve the answer by more than {now.next_gain:.2%} (all of them together by"
        f" {now.loss:.1%})"
    )


def bounds_to_beat(
    guide: CandidateOptimizer,
    told: Sequence[Observation],
    candidate: Candidate,
    measured: Sequence[Measured],
    baseline: Candidate,
    noise_sd: float,
    *,
    drops_in: bool,
) -> tuple[TrialToBeat, ...]:
    """Whom a trial of the candidate is compared with while it runs; empty where an objective cannot be foretold from its steps.

    A candidate with the baseline's global batch and numerics may be the drop-in pick, so only such ones are its rivals;
    one with its batch alone needs no branch, so only such are rivals of that. What can be no answer is no rival.

    Args:
        noise_sd: Standard deviation of the logarithm of one reading of a step time, as far as the study knows it.
        drops_in: Whether the candidate trains as the baseline does.
    """
    world, batch = guide.world_size, candidate.global_batch_size(guide.world_size)
    usable = [m for m in measured if m.usable and not m.barred and not m.unreproducible and m.candidate != candidate]
    if batch == baseline.global_batch_size(world):
        usable = [m for m in usable if m.candidate.global_batch_size(world) == batch]
        if drops_in:
            usable = [m for m in usable if m.numerics_kept]
    if not usable or of_kind("per_step", "per_sample").intersection(guide.metrics):
        return ()
    believed = guide.beliefs(told, [candidate])
    fewest = {metric: _low(*believed.log_count(metric)) for metric in of_kind("count").intersection(guide.metrics)}
    found = [rival for m in usable if (rival := _rival(m, guide.metrics, batch, fewest, noise_sd)) is not None]
    found.sort(key=lambda rival: (rival.step_time_s, rival.peak_memory_bytes or 0.0))
    needed: list[TrialToBeat] = []
    for rival in found:  # one that is easier to lose against in both ways says all that the other says
        if not needed or (rival.peak_memory_bytes or 0.0) < min(other.peak_memory_bytes or 0.0 for other in needed):
            needed.append(rival)
    return tuple(needed[:MOST_RIVALS])


def _low(mean: Floats, sd: Floats) -> float:
    return math.exp(min(float(mean[0]) - 2 * float(sd[0]), 700.0))


def _rival(
    measured: Measured, metrics: Sequence[str], batch: int, fewest: Mapping[str, float], noise_sd: float
) -> TrialToBeat | None:
    """A trial as one to beat, by a candidate of a global batch that needs at least the `fewest` samples by each metric that counts them."""
    values = measured.metrics
    if any(not values.get(metric, 0.0) > 0 for metric in (*metrics, "samples_per_s")):
        return None
    step_time_s = max(
        (_step_time_for(metric, values, batch, fewest) for metric in metrics if metric != MEMORY), default=0.0
    )
    low, high = measured.ci95.get("samples_per_s", (1.0, 1.0))
    own = math.log(high / low) / 2 if 0 < low <= high else 0.0
    margin = min(max(RIVAL_MARGIN, math.exp(max(own, math.sqrt(2) * Z95 * noise_sd))), WIDEST_MARGIN)
    peak = values[MEMORY] if MEMORY in metrics else None
    return TrialToBeat(
        trial=measured.trial, step_time_s=step_time_s * margin, peak_memory_bytes=peak,
        log_slowdown=measured.log_slowdown.get(0, 0.0),
    )  # fmt: skip


def _step_time_for(metric: str, values: Mapping[str, float], batch: int, fewest: Mapping[str, float]) -> float:
    """The step time at which a trial is only as good as what was measured, by an objective."""
    if metric == "step_time_s":
        return values[metric]
    if metric not in fewest:  # a rate, by samples: what a sample holds of anything else is the data's
        return batch / values["samples_per_s"]
    return batch / (values[metric] * fewest[metric]) if metric == GOODPUT else values[metric] * batch / fewest[metric]
