"""Whether a training's loss depends on how its samples are split into micro-batches, by the first losses of two trials."""

import math
from collections.abc import Sequence

import numpy as np

from autotune.scoring.convergence.branch import Run, pieces, slope_of
from autotune.scoring.quantiles import t95
from autotune.trial.profile import Floats

# As many first steps are compared: the weights are still nearly the same.
LEAST_STEPS, MOST_STEPS = 3, 8
# Share of the loss below which a difference is of no account, as that of means over other paddings.
LEAST_OFF = 0.05
# A difference beyond this many 95 % half-widths is no chance: each trial of a study is compared.
SURE = 2.0
# Share of the loss beyond which it is another objective, with which no training compares: a contrastive loss over
# twice the samples begins log 2 higher.
ANOTHER_OBJECTIVE = 0.15
# Losses are to each other as the micro-batches where the ratios differ by less than this share: the weights move a little.
SAME_RATIO = 0.03
# What to do about a loss that is a sum over the samples.
AVERAGE = (
    "the loss is a sum over the samples of a micro-batch: divide it by their number, and micro-batches can be tuned"
)


def first_losses_off(
    losses: Sequence[float | None], baseline: Sequence[float | None], *, same_numerics: bool = True
) -> float:
    """Returns the share by which the first losses of a trial differ from the baseline's; 0 where that may be chance.

    Args:
        losses: The trial's loss of each step; the trial starts from the baseline's weights and trains on its samples.
        baseline: The baseline's loss of each step.
        same_numerics: Whether both train in the same numerics. Where they do not, only another objective counts, and it
            has to show in the first step: rounding moves no loss that far before the weights have moved.
    """
    n = min(len(losses), len(baseline), MOST_STEPS)
    own, other = (np.array(each[:n], dtype=float) for each in (losses, baseline))  # None becomes nan
    if n < LEAST_STEPS or not np.isfinite([own, other]).all():
        return 0.0
    difference, least = own - other, LEAST_OFF if same_numerics else ANOTHER_OBJECTIVE
    mean, reach = float(difference.mean()), SURE * t95(n - 1) * float(difference.std(ddof=1)) / math.sqrt(n)
    found = [(mean, reach, float(np.abs(other).mean()), not same_numerics)]
    if n > LEAST_STEPS:  # where both losses fall far within these steps, so does the difference
        begin, reach = _beginning(difference)
        # Twice as sure: it is a second look, and late steps, whose noise falls with the loss, tell the scatter.
        found.append((begin, 2 * reach, abs(float(other[0])), True))
    for off, reach, scale, in_first in found:
        shown = not in_first or difference[0] * math.copysign(1.0, off) >= least * scale
        if shown and abs(off) > max(reach, least * scale):
            return off / scale
    return 0.0


def _beginning(difference: Floats) -> tuple[float, float]:
    """Returns where a line through differences begins, and how far from there may be chance."""
    n = len(difference)
    at = np.arange(float(n)) - (n - 1) / 2
    slope, error = slope_of(difference, at)
    reach = SURE * t95(n - 2) * error * math.sqrt(float(at @ at) / n + at[0] ** 2)
    return float(difference.mean()) + slope * float(at[0]), reach


def off_at_another_batch(own: Run, baseline: Run) -> float:
    """Returns the same share for a trial with another global batch: one of its steps trains on the samples of several, or the reverse.

    The curves part as the weights do, so the difference is that of a line through the first ones at its beginning, where
    the weights are still equal. As the loss may fall far within a large step, the first large step has to lie beyond all
    small ones on its samples, by more than these move away from it until the second.

    Args:
        own: The trial, in the baseline's numerics and from its weights.
        baseline: The baseline.
    """
    small, large = sorted((own, baseline), key=lambda run: run.batch)
    n = min(MOST_STEPS, *(len(run.losses) * run.batch // large.batch for run in (small, large)))
    if n <= LEAST_STEPS:
        return 0.0
    curves = {run.batch: pieces(run, n * large.batch, n) for run in (small, large)}
    difference, scale = curves[own.batch] - curves[baseline.batch], float(np.abs(curves[baseline.batch]).mean())
    if not np.isfinite(difference).all():
        return 0.0
    begin, reach = _beginning(difference)
    side = 1.0 if curves[large.batch][0] > curves[small.batch][0] else -1.0
    nearest = max(side * loss for loss in small.losses[: -(-large.batch // small.batch)] if loss is not None)
    apart, moved = side * curves[large.batch][0] - nearest, nearest - side * curves[small.batch][1]
    least = LEAST_OFF * scale
    return begin / scale if abs(begin) > max(reach, least) and apart > max(moved, least) else 0.0


def sums_samples(off: float, micro_batch_size: int, baseline: int) -> bool:
    """Whether a loss is the sum over the samples of a micro-batch: the first ones are to each other as the micro-batches are.

    Args:
        off: The share by which the first losses differ, as `first_losses_off` has it.
        micro_batch_size: The trial's.
        baseline: The baseline's micro-batch.
    """
    return bool(off) and math.isclose((1 + off) * baseline, micro_batch_size, rel_tol=SAME_RATIO)
