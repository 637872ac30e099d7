"""Which of very many candidates are looked at closely, and what must be tried before the model of them may be believed.

A confident prior that is wrong about a level is never corrected otherwise.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from autotune.scoring.convergence import quality_gate
from autotune.search.model import CostModel, Rows
from autotune.search.observation import Observation
from autotune.space.candidate import Candidate, differing
from autotune.trial.profile import Floats

# The best by each objective, by the goal and by random weightings of both; random rows; the best of each level.
TOP, WEIGHTINGS, RANDOM_ROWS, OF_A_LEVEL = 120, 6, 600, 6
# What is smooth in the model is worked out for this many leading candidates; among them the best of each level are sought
# before all are searched.
LEADING = 5000
# Each level of a knob whose best candidate may be within this factor of the best by the goal is tried once, if it is
# likely to fit and complete.
COVERED_WITHIN, LIKELY = 2.5, 0.5
# By how many standard deviations such a candidate may be better than expected.
OPTIMISM = 2.0
# What the model does not know to this (standard deviation of the goal's logarithm) and may be the best is tried too: a
# level that was tried once says little of what it does among others.
UNKNOWN_SD = 0.2
# How much better a candidate with other numerics has to be for a quick study to try it.
GATE_PRICE = 0.03
# What each setting that it changes besides has to be worth: a change that does nothing would stay in the answer.
CHANGE_PRICE = 0.005
# How much better than the baseline a candidate is expected to be, for it to be tried since it needs no check.
WORTH_DROPPING_IN = 0.01


def pool(state: CostModel, open_rows: NDArray[np.bool_], rng: np.random.Generator) -> Rows:
    """The rows to look at closely: near-optimal for several weightings, the best of each level, and random ones.

    Args:
        open_rows: Which rows may be chosen.
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
    weights = np.vstack([np.eye(costs.shape[1]), state.shares, rng.dirichlet(np.ones(costs.shape[1]), WEIGHTINGS)])
    chosen = [np.argpartition(scaled @ weight, TOP)[:TOP] for weight in weights]
    chosen.append(rng.integers(0, len(rows), RANDOM_ROWS))
    lead = scaled.min(axis=1)
    present = state.catalogue.present[rows[leading]] > 0
    for column in range(present.shape[1]):
        best = leading[_best_of(lead[leading], present[:, column])]
        if len(best) < OF_A_LEVEL:
            best = _best_of(lead, state.catalogue.present[rows, column] > 0)
        chosen.append(best)
    return rows[np.unique(np.concatenate(chosen))]


def _scaled(costs: Floats) -> Floats:
    """How far each row is from the least cost, by the spread of each column."""
    return np.asarray((costs - costs.min(axis=0)) / (costs.std(axis=0) + 1e-9), dtype=float)


def _best_of(lead: Floats, level: NDArray[np.bool_]) -> Rows:
    rows = np.flatnonzero(level)
    return rows if len(rows) <= OF_A_LEVEL else rows[np.argpartition(lead[rows], OF_A_LEVEL)[:OF_A_LEVEL]]


def needed(state: CostModel, rows: Rows, allowed: Floats, held: Rows) -> Floats:
    """How much each row is worth to try for what it shows; all 0 where the model may be believed.

    Args:
        allowed: Probability of each that it runs and keeps the bounds.
        held: The measured ones that keep the bounds; at least one.
    """
    mean, sd = state.goal(rows)
    likely = allowed >= LIKELY
    untried = _untried_levels(state, rows) * likely
    untried = untried * (mean - OPTIMISM * sd - mean.min() < math.log(COVERED_WITHIN))
    if untried.any():
        # A candidate with several of them saves trials, and one that is hopeful besides may be the answer.
        return np.asarray(untried * np.exp(mean.min() - mean), dtype=float)
    lead = state.goal(held)[0].min() - (mean - OPTIMISM * sd)
    return np.asarray(np.maximum(lead, 0.0) * (sd > UNKNOWN_SD) * likely, dtype=float)


def _untried_levels(state: CostModel, rows: Rows) -> Floats:
    """How many levels of each row no trial had."""
    present = state.catalogue.present
    tried = present[sorted(state.known)].any(axis=0)
    return np.asarray(present[rows][:, ~tried].sum(axis=1), dtype=float)


def untried_drop_ins(
    state: CostModel,
    open_rows: NDArray[np.bool_],
    told: Sequence[Observation],
    drops_in: Callable[[Candidate], bool] | None,
) -> NDArray[np.bool_] | None:
    """The open rows that train as the baseline does and may fit, once a trial did not; None if one was tried, or none may be better.

    What needs checks may fail them, or the time for them may lack: then such a one is the answer.
    """
    if drops_in is None or len(told) < 2 or any(drops_in(t.candidate) for t in told[1:]):
        return None
    candidates, batch = state.catalogue.candidates, state.catalogue.batch
    alike = [row for row in np.flatnonzero(open_rows & (batch == batch[0])) if drops_in(candidates[row])]
    rows = np.array(alike, dtype=np.intp)
    rows = rows[state.fits(rows) >= LIKELY]
    if not len(rows):
        return None
    best, own = (state.goal(each)[0].min() for each in (rows, np.array([0])))
    found = np.zeros(len(open_rows), dtype=bool)
    found[rows] = True
    return found if best < own - WORTH_DROPPING_IN else None


def price(candidates: Sequence[Candidate], rows: Rows) -> Floats:
    """What rows have to be better by for a quick study: for each setting that they change, and where they need the quality gate.

    The gate trains longer than all trials together.

    Args:
        candidates: All of them, the baseline first.
    """
    own, config = candidates[0], candidates[0].to_deepspeed()
    gated = [
        candidates[row].other_numerics != own.other_numerics
        or not quality_gate.differs_in_sums_alone(candidates[row].to_deepspeed(), config)
        for row in rows
    ]
    changes = [len(differing(candidates[row].values(), own.values())) for row in rows]
    return np.asarray(GATE_PRICE * np.array(gated, dtype=float) + CHANGE_PRICE * np.array(changes, dtype=float))
