"""Step-time statistics: where warm-up ends, the median with its interval, and when a trial was measured well enough.

The step time is the median of the timed steps: what an ordinary step takes. Throughput does not follow from it where
steps differ; see `rates`.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from autotune.scoring import rates
from autotune.scoring.quantiles import Z95, t95
from autotune.scoring.shared_cores import SLOPE, SLOPE_SD
from autotune.trial.request import TrialToBeat
from autotune.trial.result import StepStats

# The first step pays for lazy initialisation, the second is taken apart phase by phase: neither is ever timed.
SETUP_STEPS = 2
MIN_TIMED_STEPS = 5
# Fewer steps give no step time; as many has a trial that ends since its deadline is near.
FEWEST_STEPS = SETUP_STEPS + 1
# Fewest timed steps that give an interval, if the budget ends early.
LEAST_TIMED_STEPS = 3
TARGET_RELATIVE_CI = 0.02
MOST_SPLITS = 256  # places where the end of the warm-up is sought
# The first timed step exceeds the median by less than this share in 95 % of 206 trials of two studies (see RIVAL_FACTOR).
FEW_STEPS_WIDTH = 0.43
# Half the range of three steps, times this, is 1.96 standard errors of their median, as from four steps on half the
# range or less is by itself: where steps are normal, 1.96 x 0.670 sd against half of 1.693 sd.
RANGE_OF_THREE = 1.55


def warmup_steps(times_s: Sequence[float]) -> int:
    """Steps to cut at the start, found as the change-point of the series.

    Splits the log times in two where the summed absolute deviation from the two medians is smallest (L1 change-point,
    at most half the series, and at least three steps stay), and believes the split only where it explains more than
    noise: the cost must fall by more than three robust standard deviations of the second part, and the medians must
    differ by over 5 %.
    The set-up steps are always cut, whatever their length.
    """
    logs = np.log(np.maximum(np.asarray(times_s, dtype=float), 1e-9))[SETUP_STEPS:]
    if len(logs) < 4:
        return min(SETUP_STEPS, len(times_s))
    # Long series are split at every few steps only: each split takes two medians of the whole series.
    last = min(len(logs) // 2, len(logs) - LEAST_TIMED_STEPS)
    splits = np.unique(np.linspace(0, last, min(last + 1, MOST_SPLITS)).astype(int))
    costs = [_deviation(logs[:k]) + _deviation(logs[k:]) for k in splits]
    best = int(np.argmin(costs))
    k = int(splits[best])
    if k == 0:
        return SETUP_STEPS
    spread = 1.4826 * float(np.median(np.abs(logs[k:] - np.median(logs[k:]))))
    shift = abs(float(np.median(logs[:k]) - np.median(logs[k:])))
    believed = costs[0] - costs[best] > 3 * spread and shift > max(0.05, 2 * spread)
    return SETUP_STEPS + (k if believed else 0)


def _deviation(values: np.ndarray) -> float:
    return float(np.abs(values - np.median(values)).sum()) if len(values) else 0.0


def summarise(times_s: Sequence[float]) -> StepStats:
    """Median and confidence interval of the steps after warm-up.

    The interval is the distribution-free one between order statistics, with the number of independent steps reduced by
    their lag-1 correlation, n (1 - r) / (1 + r), since neighbouring steps share what disturbs the machine. Below six
    steps no two of them enclose the median in 95 % of samples: the interval is then 1.96 standard errors. Below three it is
    what a first step may be off by.

    Args:
        times_s: Every optimizer step of the trial in order, warm-up included, each the slowest rank's.
    """
    cut = warmup_steps(times_s)
    timed = np.asarray(times_s[cut:], dtype=float)
    if len(timed) == 0:
        return StepStats(median_s=math.nan, ci95_s=math.inf, n_steps=0, n_warmup=cut)
    return StepStats(median_s=float(np.median(timed)), ci95_s=_median_ci95(timed), n_steps=len(timed), n_warmup=cut)


def _readings(values: np.ndarray) -> np.ndarray:
    """One value for each reading of the clock: steps timed together in one window are equal values in a row."""
    return values[np.append(True, np.diff(values) != 0)] if len(values) else values


def _median_ci95(steps: np.ndarray) -> float:
    values = _readings(steps)
    n = len(values)
    if n < 3:  # which say nothing of their spread
        return (FEW_STEPS_WIDTH if len(steps) < 3 else 1.0) * float(np.median(values))
    correlation = max(0.0, _lag1(values))
    independent = max(3.0, n * (1 - correlation) / (1 + correlation))
    # Order statistics at n/2 -+ 1.96 sqrt(n)/2 enclose the median in 95 % of samples; dependence widens them.
    reach = Z95 * math.sqrt(n) / 2 * math.sqrt(n / independent)
    ordered = np.sort(values)
    low = ordered[max(0, math.floor(n / 2 - reach - 0.5))]
    high = ordered[min(n - 1, math.ceil(n / 2 + reach - 0.5))]
    return (RANGE_OF_THREE if n == 3 else 1.0) * float(high - low) / 2


def _lag1(values: np.ndarray) -> float:
    centred = values - values.mean()
    power = float((centred**2).sum())
    return float((centred[1:] * centred[:-1]).sum()) / power if power > 0 and len(values) > 7 else 0.0


def measured_enough(times_s: Sequence[float], taken_in: Mapping[str, Sequence[int]] | None = None) -> bool:
    """Whether at least five timed steps, read from the clock at least five times, give the median to 2 %.

    Where the data make steps longer and shorter, the rate has to be known that well too.
    Pure and deterministic: every rank calls it on the same gathered times, so all ranks stop at the same step.
    """
    if len(times_s) < SETUP_STEPS + MIN_TIMED_STEPS:
        return False
    summary = summarise(times_s)
    n_readings = len(_readings(np.asarray(times_s[summary.n_warmup :], dtype=float)))
    if n_readings < MIN_TIMED_STEPS or summary.relative_ci > TARGET_RELATIVE_CI:
        return False
    sizes = (taken_in or {}).get("elements", ())[summary.n_warmup :]
    if len(set(sizes)) < 2:
        return True
    found = rates.total_rate(times_s[summary.n_warmup :], (taken_in or {})["samples"][summary.n_warmup :], sizes)
    return found is not None and found.high <= found.low * (1 + 2 * TARGET_RELATIVE_CI)


def ratio_ci95(log_ratios: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Geometric mean of paired ratios, given as natural logarithms, with its 95 % interval (Student's t)."""
    values = np.asarray(log_ratios, dtype=float)
    n = len(values)
    centre = float(values.mean())
    spread = float(values.std(ddof=1)) if n > 1 else math.inf
    reach = t95(n - 1) * spread / math.sqrt(n)
    low = math.exp(centre - reach) if reach < 50 else 0.0
    return math.exp(centre), (low, math.exp(min(centre + reach, 50.0)))


# Factor by number of timed steps, and least seconds of them: a trial may be stopped where its fastest step, divided by
# the factor, is slower than its rival allows. The first steps read high (over 206 trials of two studies, 95 % of them
# below 1.43, 1.15 and 1.04 of the median).
RIVAL_FACTOR, RIVAL_S = {1: 1.6, 2: 1.2, 3: 1.0}, 0.3
# Timed steps that it takes where batches vary in size: a few may all be longer than the mean by chance.
RIVAL_VARYING_STEPS = 8


def beaten_by(
    rivals: Sequence[TrialToBeat],
    times_s: Sequence[float],
    peak_memory_bytes: float,
    sizes: Sequence[int] = (),
    log_slowdown: float = 0.0,
) -> TrialToBeat | None:
    """The rival that a trial cannot match any more; None if there is none, or too little was timed.

    Args:
        times_s: Every optimizer step so far, set-up included; the fastest but the first bounds the step time from
            below.
        peak_memory_bytes: Its peak so far, which can only grow.
        sizes: What each step took in; the same for all if not given.
        log_slowdown: What other processes do to its step times; what they do beyond a rival's is not held against it, by
            the upper end of the 95 % interval of its power.
    """
    timed = times_s[SETUP_STEPS:]
    least = RIVAL_VARYING_STEPS if len(set(sizes)) > 1 else 1
    if len(timed) < least or sum(timed) < RIVAL_S:
        return None
    # The second step of the set-up is slower for being taken apart, but guards against a hiccup in the only other one.
    fastest = min(times_s[1:]) / RIVAL_FACTOR[min(len(timed), max(RIVAL_FACTOR))]
    most = SLOPE + Z95 * SLOPE_SD
    found = ((rival, most * max(0.0, log_slowdown - rival.log_slowdown)) for rival in rivals)
    return next((rival for rival, more in found if rival.beats(fastest / math.exp(more), peak_memory_bytes)), None)
