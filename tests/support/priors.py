"""Priors of cost forecasts that rest on no model of DeepSpeed."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autotune.forecast.features import PriorPrediction
from autotune.space.candidate import Candidate
from autotune.trial.profile import Floats

# Where nothing predicts the costs, all differences between candidates are left to the features.
NO_OPINION = 3.0


def flat(candidates: Sequence[Candidate]) -> PriorPrediction:
    """No opinion: every candidate costs the same."""
    return replace(
        from_logs(np.zeros(len(candidates)), np.zeros(len(candidates)), memory_scale_sd=30.0), doubt=NO_OPINION
    )


def from_logs(log_step_time: Floats, log_memory: Floats, memory_scale_sd: float = 1.0) -> PriorPrediction:
    """A prediction from logarithms alone."""
    none = np.zeros(1)
    return PriorPrediction(
        time_terms=np.exp(np.asarray(log_step_time, dtype=float))[:, None],
        memory_terms=np.exp(np.asarray(log_memory, dtype=float))[:, None],
        time_spread=none,
        memory_spread=none,
        memory_scale_sd=memory_scale_sd,
    )
