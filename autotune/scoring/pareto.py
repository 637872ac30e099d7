"""Which measurements no other one beats on every objective."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def front(gains: Sequence[Sequence[float]]) -> list[int]:
    """Indices of the points that are not dominated, in the given order; of equal points the first.

    Args:
        gains: One row for each point, one column for each objective; more is better.
    """
    values, found = np.asarray(gains, dtype=float), list[int]()
    for i, row in enumerate(values):
        no_worse, same = (values >= row).all(axis=1), (values == row).all(axis=1)
        same[:i] = False  # an earlier point beats a later one that is the same
        if not (no_worse & ~same).any():
            found.append(i)
    return found
