"""Which measurements no other one beats on every objective."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def front(values: Sequence[Sequence[float]], directions: Sequence[str]) -> list[int]:
    """Indices of the points that are not dominated, in the given order; of equal points the first.

    Args:
        values: One row for each point, one column for each objective.
        directions: `minimize` or `maximize` for each column.
    """
    signs = np.array([1.0 if direction == "minimize" else -1.0 for direction in directions])
    costs, found = np.asarray(values, dtype=float).reshape(len(values), len(signs)) * signs, list[int]()
    for i, row in enumerate(costs):
        no_worse, same = (costs <= row).all(axis=1), (costs == row).all(axis=1)
        same[:i] = False  # an earlier point beats a later one that is the same
        if not (no_worse & ~same).any():
            found.append(i)
    return found
