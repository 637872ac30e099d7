"""The samples that trials need to a target loss, estimated from all trials together.

Batch and numerics decide them; what else one trial reads is the noise of its loss curve, which re-measurements, too
short to reach the target, do not narrow.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.trial.profile import Floats

# Standard deviations of the logarithm: the level, the curve over the batch, smooth over this number of doublings
# (E_min (1 + B / B_noise), McCandlish et al., 1812.06162), and what other numerics change. Twice the batch needs between as many
# samples and twice as many: the curve is about the middle.
LEVEL_SD, CURVE_SD, DOUBLINGS, NUMERICS_SD, SLOPE = 3.0, 1.0, 4.0, 0.1, 0.5
# Batches within this (of the logarithm) are one: each is worked out of a trial's own time and rate, which are noisy.
ALIKE = 0.01
# What one trial's loss curve may be off by, before the trials say how much: median and standard deviation of the
# logarithm.
NOISE, NOISE_PRIOR = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32), (0.05, 1.0)
# Times that the side is chosen on which each reading errs.
MOST_TURNS = 5


class Pooled(NamedTuple):
    """Each trial's samples to the target by all trials: logarithms, one a trial.

    Attributes:
        below: Standard deviation towards fewer samples.
        above: The same towards more; larger where a reading is extrapolated.
    """

    mean: Floats
    below: Floats
    above: Floats


def pooled(
    log_samples: Floats, log_batch: Floats, numerics: Sequence[Hashable], below_sd: Floats, above_sd: Floats
) -> Pooled:
    """The samples to the target of all trials together.

    A reading counts with its error on the side on which the estimate lies: one that is extrapolated bounds it from below.

    Args:
        log_samples: What each trial read.
        log_batch: Logarithm of its global batch.
        numerics: Trials with equal ones compute the same numbers, but for the batch.
        below_sd: Standard deviation of the reading, as far as its own run tells, if the truth is below it.
        above_sd: The same if the truth is above.
    """
    kinds = _Kinds.of(log_batch, numerics)
    sd = below_sd
    for _ in range(MOST_TURNS):
        mean, _ = kinds.posterior(log_samples, sd)
        side = np.where(mean > log_samples, above_sd, below_sd)
        if np.array_equal(side, sd):
            break
        sd = side
    return Pooled(mean, kinds.posterior(log_samples, below_sd)[1], kinds.posterior(log_samples, above_sd)[1])


@dataclass(frozen=True)
class _Kinds:
    """The batches and numerics of trials. Trials of one kind read one value: a study of 1,000 trials has some ten of these.

    Attributes:
        of_trial: Each trial's kind.
        slope: What each trial's logarithm is expected to have more than another's, by its batch.
        prior: Covariance of the kinds' logarithms, less that.
    """

    of_trial: NDArray[np.intp]
    slope: Floats
    prior: Floats

    @classmethod
    def of(cls, log_batch: Floats, numerics: Sequence[Hashable]) -> "_Kinds":
        kind_of = list(zip((ALIKE * np.round(log_batch / ALIKE)).tolist(), numerics, strict=True))
        kinds = {kind: n for n, kind in enumerate(dict.fromkeys(kind_of))}
        same = np.array([[a == b for _, b in kinds] for _, a in kinds], dtype=float)
        batches = np.array([batch for batch, _ in kinds])
        apart = (batches[:, None] - batches[None, :]) / np.log(2.0) / DOUBLINGS
        prior = LEVEL_SD**2 + CURVE_SD**2 * np.exp(-0.5 * apart**2) + NUMERICS_SD**2 * same
        return cls(np.array([kinds[kind] for kind in kind_of]), SLOPE * log_batch, prior)

    def posterior(self, log_samples: Floats, own_sd: Floats) -> tuple[Floats, Floats]:
        """Mean and standard deviation of each trial's logarithm, averaged over the noise by its likelihood."""
        of, prior = self.of_trial, self.prior
        level = (log_samples - self.slope).mean() + self.slope
        y, means, variances, logs = log_samples - level, [], [], []
        for noise in NOISE:
            precision = 1.0 / (noise**2 + own_sd**2)
            summed = np.bincount(of, precision)
            read = np.bincount(of, precision * y) / summed
            lower = np.linalg.cholesky(prior + np.diag(1.0 / summed))
            white = np.linalg.solve(lower, np.column_stack([read, prior]))
            target, cross = white[:, 0], white[:, 1:]
            means.append(level + (cross.T @ target)[of])
            variances.append((np.diag(prior) - (cross**2).sum(axis=0))[of])
            within = np.log(precision).sum() - np.log(summed).sum() - (precision * (y - read[of]) ** 2).sum()
            likelihood = -0.5 * target @ target - np.log(np.diag(lower)).sum() + 0.5 * within
            logs.append(likelihood - 0.5 * (np.log(noise / NOISE_PRIOR[0]) / NOISE_PRIOR[1]) ** 2)
        weights = np.exp(np.array(logs) - max(logs))
        weights /= weights.sum()
        mean = weights @ np.array(means)
        variance = weights @ (np.array(variances) + (np.array(means) - mean) ** 2)
        return np.asarray(mean), np.sqrt(np.maximum(variance, 0.0))
