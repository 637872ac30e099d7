"""Sentences that justify a recommendation: knobs changed, gains, checks, a better trial not picked, drift."""

import math
from collections.abc import Sequence

from autotune.scoring.estimates import READS_BETTER, TO_TARGET, WITHIN_NOISE, Estimates
from autotune.scoring.measured import Measured
from autotune.scoring.metrics import GOODPUT, METRICS
from autotune.scoring.objective import Objective

# Why the user's own configuration is recommended: see `kept`.
KEPT, ALONE = "no trial that passed its checks is measurably better", "nothing else was measured"
# The noise scale grows over a training (McCandlish et al., 1812.06162).
SMALLER = (
    "a smaller global batch pays most at the start of a training, where this was measured, and less later"
    " (`--from-checkpoint` measures from weights of yours)"
)
# From this change of the machine's speed between first trial and re-measurements on, the reasons mention it: 10 %.
DRIFT = 0.1


def kept(n_measured: int) -> str:
    """Why the user's own configuration is recommended, of `n_measured` trials that yielded something."""
    return KEPT if n_measured > 1 else ALONE


def named(objectives: Sequence[Objective]) -> str:
    """What is best by the objectives: `throughput`, or `compromise of step time and throughput`."""
    *first, last = [METRICS[o.metric].label for o in objectives]
    return f"compromise of {', '.join(first)} and {last}" if first else last


def words(measured: Measured, estimates: Estimates, objectives: Sequence[Objective]) -> list[str]:
    """The changes of a trial, and its gains over the baseline."""
    baseline = estimates.baseline
    if baseline is None:
        return ["the baseline did not complete, so there is no speed-up to state"]
    if measured.trial == baseline.trial:
        return ["this is the baseline"]
    found = measured.candidate.changes_from(baseline.candidate)
    gains = [f"{METRICS[o.metric].label} {_gain(measured, estimates, o.metric)}" for o in objectives]
    smaller = measured.candidate.samples_per_rank < baseline.candidate.samples_per_rank
    early = [SMALLER] if smaller and any(o.metric in {GOODPUT, TO_TARGET} for o in objectives) else []
    return [
        *([f"what changes: {', '.join(found)}"] if found else []), f"against the baseline: {', '.join(gains)}", *early
    ]  # fmt: skip


def _gain(measured: Measured, estimates: Estimates, metric: str) -> str:
    """A gain over the baseline in words."""
    assert estimates.baseline is not None
    gain = estimates.gain(measured, estimates.baseline, metric)
    if gain is None:
        return "not measured"
    if gain.vague:
        return "cannot be compared"
    times = f"{max(gain.factor, 1 / gain.factor):.2f}x"
    if times == "1.00x":
        return "equal"
    said = f"{times} {'better' if gain.factor >= 1 else 'worse'}"
    if not estimates.told(measured, metric):
        luck = f": the best of {estimates.n_looked_at} trials {READS_BETTER}" if gain.told else ""
        return f"{said} ({WITHIN_NOISE}{luck})"
    if metric != GOODPUT:
        return said
    # Goodput read as the time to any target, relative to the baseline's.
    return f"{said} (a target in {1 / gain.factor:.2f}x the baseline's time, {1 / gain.high:.2f} to {1 / gain.low:.2f})"


def checked(measured: Measured) -> list[str]:
    """The outcome of its checks, if its numbers or its global batch differ from the baseline's."""
    verdict, branch = measured.verdict, measured.branch
    if measured.doubt:  # only where no baseline ran that could refute it
        return [f"unconfirmed: {measured.doubt}"]
    said = [branch.reason] if branch is not None and measured.branch_wanted else []
    if measured.numerics_kept or verdict is None:
        return said
    if verdict.gradient_error is not None:
        return [*said, f"sums up more gradients in 16 bits than the baseline: {verdict.compared}"]
    at = f" at a global batch of {verdict.batch}" if verdict.batch else ""
    return [*said, f"not seen to train worse than the baseline's numerics{at}: {verdict.compared}"]


def once(measured: Measured) -> str:
    """Why a trial is not confirmed."""
    return f"it {'failed when it was measured again' if measured.failed_again else 'was measured once'}"


def passed_by(first: Measured, best: Measured, by: str = "") -> list[str]:
    """A better trial, by a metric if one is named, and the reason that it is not picked."""
    reads = f"trial {first.trial} reads better{f' by {by}' if by else ''}"
    return [f"{reads}, but {first.doubt}"] if first.doubt and first.trial != best.trial else []


def drift(estimates: Estimates) -> list[str]:
    """A caution if the machine's speed changed during the study: ratios hold, absolute times are its average."""
    change = estimates.drift
    if abs(change) < DRIFT:
        return []
    word = "slower" if change > 0 else "faster"
    return [
        f"caution: this machine ran the baseline {math.exp(abs(change)):.2f}x {word} at the end of the study than"
        " at its start"
    ]
