"""The DeepSpeed JSON of advice, with every default stated that differs between DeepSpeed's releases."""

from collections.abc import Mapping
from typing import Any

from autotune.forecast.knobs import (
    DEFAULT_BUCKET,
    DEFAULT_PREFETCH,
    MAX_LIVE_PARAMETERS,
    MAX_REUSE_DISTANCE,
    PERSISTENCE,
    SUB_GROUP,
)
from autotune.space.candidate import Candidate
from autotune.space.deepspeed import DTYPES, DsConfig

# Compared from 0.16.0 to 0.19.8: gradient_clipping was 0 and is 1, pin_memory was false and is true, and bf16 got a
# check for overflow, which is on. The sizes did not change, but the forecast rests on them.
PINNED: Mapping[str, Any] = {
    "gradient_clipping": 1.0,
    "bf16": {"check_grad_overflow": True, "immediate_grad_update": False},
    "zero_optimization": {
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "overlap_comm": True,
        "reduce_bucket_size": DEFAULT_BUCKET,
        "allgather_bucket_size": DEFAULT_BUCKET,
        "sub_group_size": SUB_GROUP,
        "stage3_prefetch_bucket_size": DEFAULT_PREFETCH,
        "stage3_param_persistence_threshold": PERSISTENCE,
        "stage3_max_live_parameters": MAX_LIVE_PARAMETERS,
        "stage3_max_reuse_distance": MAX_REUSE_DISTANCE,
        "stage3_gather_16bit_weights_on_model_save": False,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
    },
}


def ds_config(candidate: Candidate, base: Mapping[str, Any] | None = None) -> DsConfig:
    """The whole DeepSpeed configuration of a candidate.

    Args:
        base: The user's own, which goes before what is pinned.
    """
    own = dict(base or {})
    merged = {**PINNED, **own}
    for section in ("bf16", "zero_optimization"):
        merged[section] = {**PINNED[section], **(own.get(section) or {})}
    if candidate.precision in DTYPES:
        merged["data_types"] = {"grad_accum_dtype": candidate.precision, **(own.get("data_types") or {})}
    return candidate.to_deepspeed(merged)
