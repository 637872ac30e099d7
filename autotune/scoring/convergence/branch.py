"""The branch check: a candidate's global batch against the baseline's, from equal weights and on equal data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.scoring.quantiles import Z95
from autotune.trial.profile import Floats

DRAWS = 2000
# Windows of equal data that curves are compared over; fewer do not show their noise.
MOST_WINDOWS, FEWEST_WINDOWS = 24, 6
# Relative standard deviation between two measurements of one throughput.
SPEED_SD = 0.02
# Samples before the branch where they are not known, as a multiple of the branch's: the logarithm is a line there.
FAR = 1000.0
# Lower end of the time ratio, relative to the predicted one (or to 1), up to which nothing is refuted; and the widest
# interval, high over low, that decides.
TOLERANCE, WIDEST = 1.05, 3.0
# A larger batch's gradient is at most as good per sample (McCandlish et al., arXiv 1812.06162).
FEWER_SAMPLES = "; it needed fewer samples, too, which a larger batch alone rarely does: another learning rate may do so for your batch"
# The remedy where a branch decides nothing.
MORE = "a longer one tells more (more time, or --branch-tokens), --no-branch does without"


@dataclass(frozen=True, kw_only=True)
class Branch:
    """What a branch from the baseline's state showed.

    Attributes:
        confirmed: Whether the candidate is as good as predicted, or at least as the baseline; None if it cannot be
            told.
        time_ratio: Its time to the baseline's loss over the baseline's time; below 1 is sooner; None if it
            is not known.
        low: Lower end of the 95 % interval.
        samples_ratio: The samples that it needs to the baseline's loss over those of the baseline; None if not known.
        samples_sd: Standard deviation of the logarithm of that.
    """

    confirmed: bool | None
    reason: str
    time_ratio: float | None = None
    low: float = 0.0
    high: float = 0.0
    n_samples: int = 0
    samples_ratio: float | None = None
    samples_sd: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """One side of a branch: a loss for each step, of `batch` samples."""

    losses: Sequence[float | None]
    batch: int
    samples_per_s: float


def compare(own: Run, baseline: Run, predicted: float | None = None, seen: float | None = None) -> Branch:
    """Compares two runs that began from the same weights and saw the same samples in the same order.

    Both curves are averaged over the same pieces of data, so that what the data does to both cancels out. The
    baseline's is taken as a - b log(x + x0), x samples into the branch and x0 samples before it (a line where x0 is not
    known). With e the mean difference over the later half and x its middle, the candidate is at x where the baseline
    was at x', and

        x' + x0 = (x + x0) exp(-e / b),   time ratio = x / x' * (throughput of the baseline) / (its own)

    A step's loss is that of weights half a batch old, which counts against large batches and is taken out.

    Args:
        predicted: The time ratio that noise scale and throughput promise.
        seen: Samples that the weights had seen before; None if that is not known.
    """
    n_samples = min(len(own.losses) * own.batch, len(baseline.losses) * baseline.batch)
    n_windows = min(MOST_WINDOWS, n_samples // max(own.batch, baseline.batch, 1))
    if n_windows < FEWEST_WINDOWS:
        why = f"{n_samples:,} samples are too few for a branch of this batch; {MORE}"
        return Branch(confirmed=None, reason=why, n_samples=n_samples)
    curves = [pieces(run, n_samples, n_windows) for run in (own, baseline)]
    if not all(np.isfinite(curve).all() for curve in curves):
        return Branch(confirmed=False, reason="in the branch its loss was not finite", n_samples=n_samples)
    width, later = n_samples / n_windows, slice(n_windows // 2, None)
    before = seen if seen is not None else FAR * n_samples
    at = np.log((np.arange(n_windows) + 0.5) * width + before)
    middle = math.exp(float(at[later].mean())) - before
    first = n_windows // 4  # where the curve is steepest
    slope, fall_sd = slope_of((curves[0] + curves[1])[first:] / 2, at[first:])
    fall = -slope
    difference = (curves[0] - curves[1])[later]
    if fall <= 2 * fall_sd:
        why = f"its global batch is unconfirmed: the loss fell too little in {n_samples:,} samples to compare; {MORE}"
        return Branch(confirmed=None, reason=why, n_samples=n_samples)
    rng = np.random.default_rng(0)
    falls = np.maximum(fall / 10, fall + fall_sd * rng.standard_normal(DRAWS))
    error = float(difference.std(ddof=1) / math.sqrt(len(difference)))
    behind = float(difference.mean()) + error * rng.standard_normal(DRAWS)
    stale = (own.batch - baseline.batch) / 2
    there = (middle + before) * np.exp(-behind / falls) - before + stale
    speed = own.samples_per_s / baseline.samples_per_s * np.exp(SPEED_SD * rng.standard_normal(DRAWS))
    # Behind by all that it saw: it never comes to where the baseline was.
    needed = middle / np.maximum(there, middle / 100)
    ratios = needed / speed
    value = float(np.median(ratios))
    low, high = (float(end) for end in np.quantile(ratios, (0.025, 0.975)))
    said = f"in a branch of {n_samples:,} samples it reached the baseline's loss in {value:.2f}x"
    confirmed, end = _judged(predicted, low, high)
    if own.batch > baseline.batch and float(np.quantile(needed, 0.975)) < 1:
        end += FEWER_SAMPLES
    return Branch(
        confirmed=confirmed, reason=f"{said} ({low:.2f} to {high:.2f}) of the baseline's time{end}", time_ratio=value,
        low=low, high=high, n_samples=n_samples, samples_ratio=float(np.median(needed)),
        samples_sd=float(np.diff(np.log(np.quantile(needed, (0.025, 0.975))))[0] / 2 / Z95),
    )  # fmt: skip


def of_another(found: Branch, trial: int, faster: float) -> Branch:
    """Returns the branch of another trial with the same batch and numerics, derived from the branch of a trial.

    Args:
        found: The trial's branch; its time ratio is known.
        trial: The trial's number.
        faster: The other trial's throughput over this trial's.
    """
    assert found.time_ratio is not None
    value, low, high = (end / faster for end in (found.time_ratio, found.low, found.high))
    confirmed, end = _judged(None, low, high)
    said = f"by the branch of trial {trial}, with the same batch and numerics, it reaches the baseline's loss in"
    said = f"{said} {value:.2f}x ({low:.2f} to {high:.2f}) of the baseline's time{end}"
    return replace(found, confirmed=confirmed, reason=said, time_ratio=value, low=low, high=high)


def _judged(predicted: float | None, low: float, high: float) -> tuple[bool | None, str]:
    """Whether an interval of the time ratio confirms the candidate, and the words for that."""
    if low > TOLERANCE * max(1.0, predicted or 1.0):
        return False, ": refuted" + (f", since {predicted:.2f}x was predicted" if predicted is not None else "")
    if high > WIDEST * low:
        return None, f", which is too wide an interval to decide; {MORE}"
    if predicted is None:
        return True, ""
    how = "sooner than" if high < predicted else "later than" if low > predicted else "as"
    return True, f", {how} predicted ({predicted:.2f}x)"


def pieces(run: Run, n_samples: int, n_windows: int) -> Floats:
    """Mean loss over each of `n_windows` equal windows of data; a step in two of them counts by its share in each."""
    losses = np.array(run.losses, dtype=float)  # None becomes NaN
    total = np.concatenate([[0.0], np.cumsum(losses) * run.batch])
    ends = np.linspace(0, n_samples, n_windows + 1)
    at = np.interp(ends, np.arange(len(total)) * float(run.batch), total)
    return np.asarray(np.diff(at) / np.diff(ends), dtype=float)


def slope_of(values: Floats, at: Floats) -> tuple[float, float]:
    """The slope of a line through values at some places, by least squares, and its standard error."""
    centred = at - at.mean()
    slope = float(centred @ values / (centred @ centred))
    residual = values - values.mean() - slope * centred
    return slope, float(np.sqrt(residual @ residual / max(1, len(values) - 2) / (centred @ centred)))
