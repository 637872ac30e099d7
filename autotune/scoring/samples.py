"""The samples that trials need to a target loss, estimated from all trials together.

Batch and numerics decide them; what else one trial reads is the noise of its loss curve, which re-measurements, too
short to reach the target, do not narrow.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from autotune.trial.profile import Floats

# Standard deviations of the logarithm: the level, the curve over the batch, smooth over this number of doublings
# (E_min (1 + B / B_noise), McCandlish et al., 1812.06162), and what other numerics change.
LEVEL_SD, CURVE_SD, DOUBLINGS, NUMERICS_SD = 3.0, 1.0, 4.0, 0.1
# What one trial's loss curve may be off by, before the trials say how much: median and standard deviation of the
# logarithm.
NOISE, NOISE_PRIOR = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32), (0.05, 1.0)


def pooled(
    log_samples: Floats, log_batch: Floats, numerics: Sequence[Hashable], own_sd: Floats
) -> tuple[Floats, Floats]:
    """Mean and standard deviation of the logarithm of each trial's samples to the target.

    Args:
        log_samples: What each trial read.
        log_batch: Logarithm of its global batch.
        numerics: Trials with equal ones compute the same numbers, but for the batch.
        own_sd: Standard deviation of the reading as far as its own run tells.
    """
    # Trials of one batch and one numerics are readings of one value: a study of 1,000 trials has some ten of these.
    kind_of = list(zip(log_batch.tolist(), numerics, strict=True))
    kinds = {kind: n for n, kind in enumerate(dict.fromkeys(kind_of))}
    of = np.array([kinds[kind] for kind in kind_of])
    same = np.array([[a == b for _, b in kinds] for _, a in kinds], dtype=float)
    batches = np.array([batch for batch, _ in kinds])
    apart = (batches[:, None] - batches[None, :]) / np.log(2.0) / DOUBLINGS
    prior = LEVEL_SD**2 + CURVE_SD**2 * np.exp(-0.5 * apart**2) + NUMERICS_SD**2 * same
    y, level = log_samples - log_samples.mean(), log_samples.mean()
    means, variances, logs = [], [], []
    for noise in NOISE:
        precision = 1.0 / (noise**2 + own_sd**2)
        summed = np.bincount(of, precision)
        read = np.bincount(of, precision * y) / summed
        lower = np.linalg.cholesky(prior + np.diag(1.0 / summed))
        white = np.linalg.solve(lower, np.column_stack([read, prior]))
        target, cross = white[:, 0], white[:, 1:]
        means.append((level + cross.T @ target)[of])
        variances.append((np.diag(prior) - (cross**2).sum(axis=0))[of])
        within = np.log(precision).sum() - np.log(summed).sum() - (precision * (y - read[of]) ** 2).sum()
        likelihood = -0.5 * target @ target - np.log(np.diag(lower)).sum() + 0.5 * within
        logs.append(likelihood - 0.5 * (np.log(noise / NOISE_PRIOR[0]) / NOISE_PRIOR[1]) ** 2)
    weights = np.exp(np.array(logs) - max(logs))
    weights /= weights.sum()
    mean = weights @ np.array(means)
    variance = weights @ (np.array(variances) + (np.array(means) - mean) ** 2)
    return np.asarray(mean), np.sqrt(np.maximum(variance, 0.0))
