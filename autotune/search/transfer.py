"""Earlier studies as a prior: the formulas describe this machine, their corrections come from the earlier trials."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autotune.forecast.features import Prior, PriorPrediction
from autotune.forecast.regression import CalibratedGP
from autotune.search.model import MEMORY, STEP
from autotune.search.observation import Observation
from autotune.search.optimizer import CandidateOptimizer
from autotune.space.candidate import Candidate
from autotune.trial.profile import Floats

# What is still doubted of a correction that comes from the same model on other terms, and from another model or another
# number of ranks on the same machine.
SAME_MODEL, RELATED_MODEL = 0.5, 0.8
# Studies with fewer trials are not carried over: they teach too little.
ENOUGH = 4


class Transferred:
    """A prior that starts where an earlier search ended.

    The analytic prior of the new circumstances says how step time and memory follow from sequence length, ranks, memory
    and so on. What the earlier trials showed of it, a factor for each term and what each knob adds, is laid over it.

    Args:
        guide: The earlier search; its prior has the same terms.
        doubt: How far the corrections may be off here, of what is believed without them.
        scale: The new reference's global batch over the earlier one's.
    """

    def __init__(
        self,
        prior: Prior,
        guide: CandidateOptimizer,
        told: Sequence[Observation],
        doubt: float = SAME_MODEL,
        scale: float = 1.0,
    ) -> None:
        self.prior, self.guide, self.told, self.doubt, self.scale = prior, guide, list(told), doubt, scale

    def __call__(self, candidates: Sequence[Candidate]) -> PriorPrediction:
        """The prediction, one row for each candidate."""
        said, known = self.prior(candidates), self.guide.beliefs(self.told, candidates)
        model = known.model
        seen = any(t.good("time_to_loss_s") for t in self.told)
        constant, growing = np.exp(model.samples.to_target.correction)
        return replace(
            said,
            time_terms=_corrected(said.time_terms, model.time, known.added(STEP)),
            memory_terms=_corrected(said.memory_terms, model.memory, known.added(MEMORY)),
            time_spread=said.time_spread * self.doubt,
            memory_spread=said.memory_spread * self.doubt,
            memory_scale_sd=min(said.memory_scale_sd, 0.3)
            if any(t.good("peak_memory_bytes") for t in self.told)
            else said.memory_scale_sd,
            doubt=said.doubt * self.doubt,
            samples_scale=(float(constant), float(growing) * self.scale) if seen else said.samples_scale,
        )


def _corrected(terms: Floats, model: CalibratedGP, added: Floats) -> Floats:
    """The terms with what a model learned of them, a factor for each where it has the same, and with what it adds to their sum."""
    factors = np.exp(model.correction)
    return np.asarray(
        terms * (factors if len(factors) == terms.shape[1] else 1.0) * np.exp(added)[:, None], dtype=float
    )
