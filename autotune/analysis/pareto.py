"""Which measurements no other one beats on every objective."""

from __future__ import annotations

from collections.abc import Sequence


def front(values: Sequence[Sequence[float]], directions: Sequence[str]) -> list[int]:
    """Indices of the points that are not dominated, in the given order; of equal points the first.

    Args:
        values: One row for each point, one column for each objective.
        directions: `minimize` or `maximize` for each column.
    """
    signs = [1.0 if direction == "minimize" else -1.0 for direction in directions]
    costs = [[sign * value for sign, value in zip(signs, row, strict=True)] for row in values]
    return [i for i, row in enumerate(costs) if not any(_beats(other, row, j < i) for j, other in enumerate(costs) if j != i)]


def _beats(other: Sequence[float], row: Sequence[float], earlier: bool) -> bool:
    """Nowhere worse, and better somewhere (or the same point again)."""
    return all(a <= b for a, b in zip(other, row, strict=True)) and (earlier or list(other) != list(row))
