"""Which of very many candidates are looked at closely, by what the model believes of all of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autotune.search.model import CostModel
from autotune.trial.profile import Floats

Rows = NDArray[np.intp]

# The best by each objective, by the goal and by random weightings of both; random rows; the best of each level.
TOP, WEIGHTINGS, RANDOM_ROWS, OF_A_LEVEL = 120, 6, 600, 6
# What is smooth in the model is worked out for this many leading candidates; among them the best of each level are sought
# before all are searched.
LEADING = 5000


def pool(state: CostModel, shares: Floats, open_rows: NDArray[np.bool_], rng: np.random.Generator) -> Rows:
    """The rows to look at closely: near-optimal for several weightings, the best of each level, and random ones.

    Args:
        shares: Weights of the objectives in the goal.
        open_rows: Which rows may be chosen.
        rng: Draws weightings and rows.
    """
    rows = np.flatnonzero(open_rows)
    if len(rows) <= TOP * 12:
        return rows
    costs, penalty = state.rough_costs()[rows], np.zeros((len(rows), 1))
    if state.limit is not None:
        over = state.memory.mean(state.catalogue.memory)[rows] - state.limit
        penalty = 10.0 * np.clip(over - 0.1, 0.0, 1.0)[:, None]
    lead = _scaled(costs + penalty).min(axis=1)
    leading = np.argpartition(lead, LEADING)[:LEADING] if len(rows) > LEADING else np.arange(len(rows))
    costs[leading] = state.rough_costs(rows[leading])
    scaled = _scaled(costs + penalty)
    weights = np.vstack([np.eye(costs.shape[1]), shares, rng.dirichlet(np.ones(costs.shape[1]), WEIGHTINGS)])
    chosen = [np.argpartition(scaled @ weight, TOP)[:TOP] for weight in weights]
    chosen.append(rng.integers(0, len(rows), RANDOM_ROWS))
    lead = scaled.min(axis=1)
    present = state.catalogue.present[rows[leading]] > 0
    for column in range(present.shape[1]):
        best = leading[_lowest(lead[leading], present[:, column], OF_A_LEVEL)]
        if len(best) < OF_A_LEVEL:
            best = _lowest(lead, state.catalogue.present[rows, column] > 0, OF_A_LEVEL)
        chosen.append(best)
    return rows[np.unique(np.concatenate(chosen))]


def _scaled(costs: Floats) -> Floats:
    """How far each row is from the least cost, by the spread of each column."""
    return np.asarray((costs - costs.min(axis=0)) / (costs.std(axis=0) + 1e-9), dtype=float)


def _lowest(values: Floats, where: NDArray[np.bool_], n: int) -> Rows:
    rows = np.flatnonzero(where)
    return rows if len(rows) <= n else rows[np.argpartition(values[rows], n)[:n]]
