"""Rates: samples or tokens of the timed steps, divided by the time of these steps, with an interval from blocks of them.

A median step divided into a step's samples is no rate where steps differ: one long step in sixty may hold most of the
time. So all is added up. What the *machine* did to a few steps is not the configuration's, though, and is told from what
the *data* did by the sizes of the steps: a step that is long because it took in more stays as it is.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.scoring.quantiles import Z95, t95
from autotune.trial.profile import Floats
from autotune.trial.result import TrialResult

# Blocks that the steps are divided into; neighbouring steps share what disturbs the machine.
MOST_BLOCKS = 20
N_RESAMPLES = 1000
# Of the steps, this share may be shortened as disturbed by the machine, and at least one.
DISTURBED_SHARE = 0.05
# A step is disturbed if it exceeds the time expected for its size by 5 robust standard deviations and by 10 %.
DISTURBED_SDS, DISTURBED_EXCESS = 5.0, 0.1


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A measured value with its 95 % interval.

    Attributes:
        value: The value, in the metric's unit.
        censored: Whether the trial ended before the value could be seen; then the value is extrapolated.
    """

    value: float
    low: float
    high: float
    censored: bool = False


def rate_of(result: TrialResult, counted: str) -> Estimate | None:
    """Returns the rate at which the timed steps of a trial took in data, in samples or tokens per second.

    Args:
        counted: What to count: a name in `taken_in`, such as `samples`.

    Returns:
        The rate; None where the times of single steps are not known, or the trial did not count it.
    """
    if result.steps is None or result.steps.n_steps == 0 or not result.taken_in.get(counted):
        return None
    n, cut = len(result.step_times_s), result.steps.n_warmup
    # Of steps that are all alike, one stands for all.
    known = {name: (each * n if len(each) == 1 else each)[cut:n] for name, each in result.taken_in.items()}
    times: Sequence[float] = result.step_times_s[cut:]
    amounts: Sequence[float] = known[counted]
    if result.expected and known.get("tokens"):
        times = as_expected(times, known["tokens"], result.expected["tokens"])
        amounts = [result.expected.get(counted, statistics.fmean(amounts))] * len(times)
        return total_rate(times, amounts)
    return total_rate(times, amounts, known.get("elements", ()))


def total_rate(times_s: Sequence[float], amounts: Sequence[float], sizes: Sequence[float] = ()) -> Estimate | None:
    """Returns the total of amounts over the total of times, with its 95 % interval; None without both.

    The interval is a block bootstrap's: percentiles of the ratio over resampled blocks of steps, widened to Student's t
    for the number of blocks. It is wide where few steps hold most of the time.

    Args:
        times_s: Seconds of the timed steps, in order.
        amounts: What is counted of each of them: samples, or tokens.
        sizes: What each took in altogether, by which long steps are explained; the same for all if not given.
    """
    times, counts = np.asarray(times_s, dtype=float), np.asarray(amounts, dtype=float)
    if not len(times) or len(times) != len(counts) or not counts.sum() > 0 or not times.sum() > 0:
        return None
    times = undisturbed(times, np.asarray(sizes if len(sizes) == len(times) else np.ones(len(times)), dtype=float))
    value = float(counts.sum() / times.sum())
    if len(times) < 3:  # too few say nothing of their spread
        return Estimate(value=value, low=value / 2, high=value * 10)
    low, high = _block_interval(times, counts)
    return Estimate(value=value, low=value * math.exp(low), high=value * math.exp(high))


def as_expected(times_s: Sequence[float], sizes: Sequence[float], expected: float) -> list[float]:
    """Returns step times as they would be if each step had the size that the whole data set leads to expect.

    A short trial sees few of the rare long steps, or too many: `t - b (size - expected)`, with the time b of a token
    from the steps themselves, takes out that chance (a control variate).

    Args:
        times_s: Seconds of the timed steps.
        sizes: Tokens of each, padding included.
        expected: Their mean over the data set.
    """
    times, tokens = np.asarray(times_s, dtype=float), np.asarray(sizes, dtype=float)
    if len(times) < 4 or np.ptp(tokens) <= 0.01 * float(np.median(tokens)):
        return list(times_s)
    apart = tokens - tokens.mean()
    slope = float(apart @ (undisturbed(times, tokens) - times.mean()) / (apart @ apart))
    # No step is faster than nothing: the time of a token is at most that of the steps as a whole.
    slope = min(max(slope, 0.0), float(times.sum() / tokens.sum()))
    return list(times - slope * (tokens - expected))


def undisturbed(times: Floats, sizes: Floats) -> Floats:
    """Returns step times in which what the machine did to a few steps is cut to the limit of what is ordinary.

    Expected is `a + b size`, or the median where the sizes are alike. At most 5 % of the steps are shortened (at
    least one may be): what happens more often belongs to the training.
    """
    expected = _expected(times, sizes)
    ratios = times / expected
    centre = float(np.median(ratios))
    spread = 1.4826 * float(np.median(np.abs(ratios - centre)))
    limit = centre + max(DISTURBED_SDS * spread, DISTURBED_EXCESS)
    n_disturbed = max(1, int(DISTURBED_SHARE * len(times)))
    longest = np.sort(ratios)[-n_disturbed - 1] if len(ratios) > n_disturbed else np.inf
    return np.minimum(ratios, max(limit, float(longest))) * expected


def _expected(times: Floats, sizes: Floats) -> Floats:
    """Returns the time to expect of each step from its size, by a line through medians (Theil-Sen's, of two groups)."""
    constant = np.full(len(times), float(np.median(times)))
    if len(times) < 4 or np.ptp(sizes) <= 0.01 * float(np.median(sizes)):
        return constant
    slopes = _slopes(times, sizes)
    slope = max(0.0, float(np.median(slopes))) if len(slopes) else 0.0
    base = float(np.median(times - slope * sizes))
    # A step may grow faster than its size (attention): a rare long one is measured by itself, not by the line.
    expected = np.maximum(base + slope * sizes, float(times.min()))
    rare = sizes > 1.5 * np.quantile(sizes, 0.9)
    return np.where(rare, np.maximum(times, 1e-12), np.maximum(expected, 1e-12))


def _slopes(times: Floats, sizes: Floats) -> Floats:
    """Returns slopes between pairs of steps of different sizes: each step with those some places away."""
    n, found = len(times), []
    for gap in {1, 2, 3, 5, 8, n // 4, n // 3, n // 2} - {0}:
        ds, dt = sizes[gap:] - sizes[:-gap], times[gap:] - times[:-gap]
        apart = np.abs(ds) > 0
        found.append(dt[apart] / ds[apart])
    return np.concatenate(found)


def _block_interval(times: Floats, counts: Floats) -> tuple[float, float]:
    """Returns the ends of the ratio's 95 % interval, as logarithms relative to the ratio."""
    n_blocks = min(MOST_BLOCKS, max(min(5, len(times)), len(times) // 3))
    edges = np.linspace(0, len(times), n_blocks + 1).astype(int)[:-1]
    block_times, block_counts = np.add.reduceat(times, edges), np.add.reduceat(counts, edges)
    rng = np.random.default_rng(0)  # all ranks and all readers get the same
    drawn = rng.integers(0, n_blocks, (N_RESAMPLES, n_blocks))
    resampled_counts, resampled_times = block_counts[drawn].sum(axis=1), block_times[drawn].sum(axis=1)
    logs = np.log(np.maximum(resampled_counts, 1e-12) / resampled_times) - math.log(counts.sum() / times.sum())
    low, high = np.quantile(logs, (0.025, 0.975))
    # The bootstrap takes the blocks for the whole population: Student's t instead of the normal, and n - 1.
    widen = t95(n_blocks - 1) / Z95 * math.sqrt(n_blocks / (n_blocks - 1))
    return min(0.0, float(low) * widen), max(0.0, float(high) * widen)
