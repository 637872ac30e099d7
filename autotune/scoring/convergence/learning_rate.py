"""How the learning rate follows the global batch, by named rules."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


def _adascale(ratio: float, noise: float) -> float:
    return (noise + 1.0) / (noise / ratio + 1.0) if math.isfinite(noise) else ratio


def _surge(ratio: float, noise: float) -> float:
    if not math.isfinite(noise) or noise == 0:
        return math.sqrt(ratio)
    return (math.sqrt(noise) + 1 / math.sqrt(noise)) / (math.sqrt(noise / ratio) + math.sqrt(ratio / noise))


@dataclass(frozen=True)
class LearningRateRule:
    """How the learning rate follows the batch.

    Attributes:
        factor: From r = B / B0 and the noise scale in units of B0, what the learning rate is multiplied by.
        says: The rule in words.
    """

    factor: Callable[[float, float], float]
    says: str


LEARNING_RATE_RULES: dict[str, LearningRateRule] = {
    "none": LearningRateRule(lambda r, n: 1.0, "the learning rate stays"),
    "linear": LearningRateRule(
        lambda r, n: r, "r times the learning rate for r times the batch (Goyal et al., arXiv 1706.02677)"
    ),
    "sqrt": LearningRateRule(
        lambda r, n: math.sqrt(r),
        "the square root of r for r times the batch (Malladi et al., arXiv 2205.10287, for Adam)",
    ),
    "adascale": LearningRateRule(
        _adascale, "AdaScale's gain, (phi / B0 + 1) / (phi / B + 1), for SGD (Johnson et al., arXiv 2007.05105)"
    ),
    "surge": LearningRateRule(
        _surge,
        "2 / (sqrt(phi / B) + sqrt(B / phi)) relative to B0: for Adam it falls again above phi (Li et al., arXiv 2405.14578)",
    ),
}


# The rules that cannot be followed without the noise scale.
NOISE_RULES = ("adascale", "surge")
# Where a DeepSpeed configuration states learning rates: the optimizer's, and those of its schedulers.
RATE_KEYS = ("lr", "warmup_min_lr", "warmup_max_lr", "cycle_min_lr", "cycle_max_lr", "lr_range_test_min_lr")


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """How a study's trials follow the batch with their learning rate.

    Attributes:
        rule: A key of `LEARNING_RATE_RULES`.
        baseline_batch: Samples of an optimizer step that the user's learning rate was set for.
        noise_samples: The noise scale, for the rules that need it; None if it is not known.
    """

    rule: str = "none"
    baseline_batch: int = 1
    noise_samples: float | None = None

    def factor(self, batch: int) -> float:
        """What the user's learning rate is multiplied by at a global batch of so many samples."""
        noise = math.inf if self.noise_samples is None else self.noise_samples
        return learning_rate_factor(self.rule, batch, self.baseline_batch, noise)

    def scaled(self, config: Mapping[str, Any], batch: int) -> dict[str, Any]:
        """A copy of a DeepSpeed configuration with every learning rate that it states multiplied."""
        scaled, factor = copy.deepcopy(dict(config)), self.factor(batch)
        for section in ("optimizer", "scheduler"):
            params = (scaled.get(section) or {}).get("params") or {}
            for key in RATE_KEYS:
                if factor != 1 and isinstance(params.get(key), int | float):
                    params[key] = float(f"{params[key] * factor:.6g}")
        return scaled


def learning_rate_factor(rule: str, batch: float, baseline_batch: float, noise_samples: float = math.inf) -> float:
    """What the learning rate is multiplied by at another global batch.

    Args:
        rule: A key of `LEARNING_RATE_RULES`.
        batch: B, samples of an optimizer step.
        baseline_batch: B0, the one that the learning rate was set for.
        noise_samples: phi, samples; not needed by `none`, `linear` and `sqrt`.
    """
    return LEARNING_RATE_RULES[rule].factor(batch / baseline_batch, noise_samples / baseline_batch)


def default_rule(optimizer: str) -> str:
    """`linear` for plain SGD, `sqrt` for everything that divides by a root of squares, as Adam does."""
    return "linear" if optimizer.lower() in ("sgd", "momentum") else "sqrt"
