"""Acquisition functions: expected improvement of one cost or of the hypervolume of several, and what stopping loses."""

import numpy as np
import scipy
from numpy.typing import NDArray

from autotune.trial.profile import Floats

DRAWN, KEPT = 6000, 256
# As many of the best measured candidates are taken to be measured again.
FINALISTS = 3


def expected_improvement(mean: Floats, sd: Floats, best: float) -> Floats:
    """Expected decrease below the best cost so far (Jones, Schonlau and Welch, 1998)."""
    z = (best - mean) / sd
    return np.asarray(
        (best - mean) * scipy.special.ndtr(z) + sd * np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi), dtype=float
    )


def hypervolume_improvement(mean: Floats, sd: Floats, front: Floats, rng: np.random.Generator) -> Floats:
    """Expected growth of the dominated hypervolume for each row, as a share of it; the costs are taken as independent.

    It is the integral, over the part of the box that the front does not dominate, of the probability that the row
    dominates the point there; the integral is a mean over random points.

    Args:
        mean: Expected costs (logarithms), one row a candidate, one column an objective.
        sd: Their standard deviations.
        front: Costs of the points that count so far.
    """
    low = np.minimum(front.min(axis=0), (mean - 1.5 * sd).min(axis=0))
    high = front.max(axis=0) + 0.1 * np.maximum(front.max(axis=0) - low, 0.05)
    points = low + (high - low) * rng.random((DRAWN, len(low)))
    free = points[~dominated(points, front)]
    ratio = len(free) / max(1, len(points) - len(free))
    free = free[:KEPT]
    if not len(free):
        return np.zeros(len(mean))
    total = np.ones((len(mean), len(free)))
    for column in range(len(low)):
        total *= scipy.special.ndtr((free[None, :, column] - mean[:, column, None]) / sd[:, column, None])
    return np.asarray(ratio * total.mean(axis=1), dtype=float)


def dominated(points: Floats, by: Floats) -> NDArray[np.bool_]:
    """Which points have a row of `by` that is no worse in every cost."""
    worse = np.all(by[None, :, :] <= points[:, None, :], axis=2)
    return np.asarray(np.any(worse, axis=1), dtype=bool)


def gains(seen: Floats, unseen: Floats) -> Floats:
    """How much better each candidate is than the best of those that are measured again; one row a draw."""
    return np.asarray(np.maximum(seen[:, :FINALISTS].min(axis=1)[:, None] - unseen, 0.0), dtype=float)


def loss_of_stopping(seen: Floats, unseen: Floats, allowed: Floats, rng: np.random.Generator) -> tuple[float, float]:
    """What stopping loses, and what the most promising single trial gains, over joint draws of the goal.

    Args:
        seen: The goal of the measured candidates, the best first, one row a draw; the first few are measured again.
        unseen: The goal of those not measured.
        allowed: Probability of each of these that it runs and keeps the bounds.
    """
    better = gains(seen, unseen) * (rng.random(unseen.shape) < allowed)
    loss = np.maximum(better.max(axis=1), seen[:, :FINALISTS].min(axis=1) - seen.min(axis=1)).mean()
    return float(loss), float(better.mean(axis=0).max())
