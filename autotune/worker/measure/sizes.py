"""Effects of size settings on this model: which bucket sizes and thresholds behave alike."""

from collections.abc import Callable
from typing import Any

import torch

from autotune.space.deepspeed import ZERO
from autotune.worker.containers import n_elements
from autotune.worker.measure.wire import wire

# A reduction is one collective at least. Of those that were to be seen, at least this share was; parameters without a
# gradient are in no bucket.
LEAST_SHARE_SEEN = 0.5


def trained_sizes(engine: Any) -> list[int]:
    """Elements of each trained parameter, the whole of those that ranks share out."""
    return [n_elements(parameter) for parameter in engine.module.parameters() if parameter.requires_grad]


def _all_sizes(engine: Any) -> list[int]:
    """The same of all parameters: ZeRO 3 gathers frozen ones, too, which are most of a model with adapters."""
    return [n_elements(parameter) for parameter in engine.module.parameters()]


def n_buckets(sizes: list[int], bucket: float) -> int:
    """Buckets that gradients are reduced in: they come last parameter first, and a full bucket is sent."""
    n, filled = 0, 0
    for size in reversed(sizes):
        if filled + size > bucket and filled:
            n, filled = n + 1, 0
        filled += size
    return n + 1


def _buckets(engine: Any, bucket: float) -> Any:
    # Elsewhere than on a CPU, whose pages are only taken when they are written, the buffer takes memory by its size.
    takes = bucket if torch.device(engine.device).type != "cpu" and engine.optimizer.contiguous_gradients else None
    return n_buckets(trained_sizes(engine), bucket), takes


def _up_to(times: int, sizes: Callable[[Any], list[int]] = _all_sizes) -> Callable[[Any, float], Any]:
    """Returns the effect of a size that matters only up to a multiple of the model's size."""
    return lambda engine, value: min(value, times * sum(sizes(engine)))


def n_up_to(engine: Any, threshold: float) -> int:
    """Parameters of at most some size."""
    return sum(size <= threshold for size in _all_sizes(engine))


# What a value leads to, by setting: values that lead to equal things do the same.
EFFECTS: dict[str, Callable[[Any, float], Any]] = {
    f"{ZERO}reduce_bucket_size": _buckets,
    f"{ZERO}sub_group_size": _up_to(1, trained_sizes),  # groups of what the optimizer updates
    f"{ZERO}stage3_prefetch_bucket_size": _up_to(1),
    f"{ZERO}stage3_model_persistence_threshold": _up_to(1),
    # Parameters are used in forward, in backward and once more where they are recomputed.
    f"{ZERO}stage3_max_live_parameters": _up_to(3),
    f"{ZERO}stage3_max_reuse_distance": _up_to(3),
    f"{ZERO}stage3_param_persistence_threshold": n_up_to,
}


def same_effect(engine: Any, name: str, value: Any, base: Any) -> bool:
    """Whether two values of a size do the same to this model."""
    effect = EFFECTS.get(name)
    return effect is not None and bool(effect(engine, value) == effect(engine, base))


def missing_collectives(engine: Any, bucket: float) -> str | None:
    """Says that fewer collectives were sent in the step taken apart than there are buckets; None if they were seen."""
    sent = sum(n for (phase, _), n in wire.calls.items() if phase in ("backward", "step"))
    wanted = n_buckets(trained_sizes(engine), bucket)
    if not sent or sent >= LEAST_SHARE_SEEN * wanted:  # nothing sent: one rank, or no step was taken apart
        return None
    return f"gradients fill {wanted} buckets of that size, and {sent} collectives were sent"
