"""Which points no other one beats on every objective."""

from collections.abc import Sequence

import numpy as np

from autotune.trial.profile import Floats


def front(gains: Floats | Sequence[Sequence[float]]) -> list[int]:
    """Indices of the points that are not dominated, in the given order; of equal points the first.

    Args:
        gains: One row for each point, one column for each objective; more is better.
    """
    costs, kept = -np.asarray(gains, dtype=float), list[int]()
    for row in np.lexsort(costs.T[::-1]) if len(costs) else ():  # what beats a point comes before it
        if not kept or not (costs[kept] <= costs[row]).all(axis=1).any():
            kept.append(int(row))
    return sorted(kept)
