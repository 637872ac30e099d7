"""How the learning rate follows the global batch, by named rules."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from autotune.space.deepspeed import RATE_KEYS


class LearningRateRule(NamedTuple):
    """How the learning rate follows the batch: it is multiplied by (B / B0) ** exponent."""

    exponent: float
    says: str


LEARNING_RATE_RULES = {
    "none": LearningRateRule(0.0, "the learning rate stays"),
    "linear": LearningRateRule(1.0, "r times the learning rate for r times the batch (Goyal et al., arXiv 1706.02677)"),
    "sqrt": LearningRateRule(
        0.5, "the square root of r for r times the batch (Malladi et al., arXiv 2205.10287, for Adam)"
    ),
}


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """How a study's trials adapt their learning rate to their batch.

    Attributes:
        rule: A key of `LEARNING_RATE_RULES`.
        baseline_batch: Samples of an optimizer step that the user's learning rate was set for.
    """

    rule: str = "none"
    baseline_batch: int = 1

    def factor(self, batch: int) -> float:
        """The factor on the user's learning rate at a global batch of `batch` samples."""
        return float((batch / self.baseline_batch) ** LEARNING_RATE_RULES[self.rule].exponent)

    def scaled(self, config: Mapping[str, Any], batch: int) -> dict[str, Any]:
        """A copy of a DeepSpeed configuration with every learning rate that it states multiplied."""
        scaled, factor = copy.deepcopy(dict(config)), self.factor(batch)

        def times(rate: Any) -> Any:  # of a schedule one for each group of parameters, if it is a list
            if isinstance(rate, list):
                return [times(each) for each in rate]
            return float(f"{rate * factor:.6g}") if isinstance(rate, int | float) else rate

        for section in ("optimizer", "scheduler"):
            params = (scaled.get(section) or {}).get("params") or {}
            params.update({key: times(params[key]) for key in RATE_KEYS if factor != 1 and key in params})
        return scaled


def default_rule(optimizer: str) -> str:
    """`linear` for plain SGD, `sqrt` for optimizers that divide by a root of squares, as Adam does."""
    return "linear" if optimizer.lower() in ("sgd", "momentum") else "sqrt"
