"""Groups of ranks that share a copy of the model, a sequence or experts, as a rank saw them."""

from dataclasses import dataclass

from autotune.space.candidate import Candidate
from autotune.space.degree import EXPERT_DEGREE, PIPELINE_DEGREE, SEQUENCE_DEGREE, TENSOR_DEGREE


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Groups of ranks of a running engine, and what one of the ranks holds.

    Attributes:
        tensor: Ranks over which layers are split.
        sequence: Ranks over which sequences are split.
        pipeline: Stages of a pipeline.
        expert: Ranks over which the experts of a mixture are shared out.
        data: Ranks, or groups of them, that train on different samples.
        split_modules: Modules that are split over a tensor group.
        exchanges: Calls in which tokens were sent to the ranks of their experts.
        held_parameters: Parameters of this rank's share of the model, before ZeRO shards them.
        by_script: A script makes them, which may split layers and sequences without a word in its configuration.
    """

    tensor: int = 1
    sequence: int = 1
    pipeline: int = 1
    expert: int = 1
    data: int = 1
    split_modules: int = 0
    exchanges: int = 0
    held_parameters: int = 0
    by_script: bool = False

    def mismatch(self, candidate: Candidate) -> str | None:
        """Returns the first degree that differs from the candidate's, in words; None if all were applied."""
        if candidate.tensor_degree > 1 and not self.split_modules:
            return f"{TENSOR_DEGREE}: {candidate.tensor_degree} was asked for, and no module was split over ranks"
        seen = {
            TENSOR_DEGREE: self.tensor, SEQUENCE_DEGREE: self.sequence, PIPELINE_DEGREE: self.pipeline,
            EXPERT_DEGREE: self.expert,
        }  # fmt: skip
        for path, ran in seen.items():
            asked = candidate.degree(path)
            own = self.by_script and asked == 1 and path in (TENSOR_DEGREE, SEQUENCE_DEGREE)
            if asked != ran and not own:
                return f"{path}: {asked} was asked for, {ran} ran"
        if candidate.expert_degree > 1 and not self.exchanges:
            return f"{EXPERT_DEGREE}: {candidate.expert_degree} was asked for, and no token was sent to another rank's experts"
        return None
