"""What must be tried before a model may be believed: levels that no trial had, and candidates that it does not know.

A confident prior that is wrong about a level is never corrected otherwise.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from autotune.search.model import CostModel
from autotune.trial.profile import Floats

Rows = NDArray[np.intp]

# Each level of a knob whose best candidate may be within this factor of the best by the goal is tried once, if it is
# likely to fit and complete.
COVERED_WITHIN, LIKELY = 2.5, 0.5
# By how many standard deviations such a candidate may be better than expected.
OPTIMISM = 2.0
# What the model does not know to this (standard deviation of the goal's logarithm) and may be the best is tried too: a
# level that was tried once says little of what it does among others.
UNKNOWN_SD = 0.2


def needed(state: CostModel, shares: Floats, rows: Rows, allowed: Floats, held: Rows) -> Floats:
    """How much each row is worth to try for what it shows; all 0 where the model may be believed.

    Args:
        shares: Weights of the objectives in the goal.
        allowed: Probability of each that it runs and keeps the bounds.
        held: The measured ones that keep the bounds; at least one.
    """
    mean, sd = state.goal(rows, shares)
    likely = allowed >= LIKELY
    untried = _untried_levels(state, rows) * likely
    untried = untried * (mean - OPTIMISM * sd - mean.min() < math.log(COVERED_WITHIN))
    if untried.any():
        # A candidate with several of them saves trials, and one that is hopeful besides may be the answer.
        return np.asarray(untried * np.exp(mean.min() - mean), dtype=float)
    lead = state.goal(held, shares)[0].min() - (mean - OPTIMISM * sd)
    return np.asarray(np.maximum(lead, 0.0) * (sd > UNKNOWN_SD) * likely, dtype=float)


def _untried_levels(state: CostModel, rows: Rows) -> Floats:
    """How many levels of each row no trial had."""
    present = state.catalogue.present
    tried = present[sorted(state.known)].any(axis=0)
    return np.asarray(present[rows][:, ~tried].sum(axis=1), dtype=float)
