"""Degrees: over how many ranks a model, its sequences or its experts are split."""

import math
from collections.abc import Callable, Mapping
from typing import Any

# Paths of DeepSpeed's configuration; leaving one out is a degree of 1.
TENSOR_DEGREE, SEQUENCE_DEGREE = "tensor_parallel.autotp_size", "sequence_parallel_size"
PIPELINE_DEGREE = "pipeline.stages"
# Ranks of these groups share a copy of the model, or a sequence, and train on the same samples.
REPLICA_DEGREES = (TENSOR_DEGREE, SEQUENCE_DEGREE, PIPELINE_DEGREE)
# Ranks of an expert group share the experts of a mixture alone, and train on samples of their own.
EXPERT_DEGREE, EXPERTS_SPLIT = "expert_parallel.autoep_size", "expert_parallel.enabled"
DEGREES = (*REPLICA_DEGREES, EXPERT_DEGREE)
# How the layers of a `PipelineModule` are shared out among its stages: `uniform`, `parameters` or `type:CLASS`.
PARTITION = "pipeline.partition"
LARGEST = 2**20


def is_degree(value: Any) -> bool:
    """Whether a value is a number of ranks; 0 and 1 are none."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST


def degrees_of(value_at: Callable[[str], Any]) -> dict[str, int]:
    """Returns the degrees of a configuration that are above 1, by path.

    Args:
        value_at: Returns the configuration's value at a dotted path, None where there is none.
    """
    found = {path: value_at(path) for path in DEGREES}
    return {path: value for path, value in found.items() if isinstance(value, int) and value > 1}


def configured_degrees(value_at: Callable[[str], Any]) -> dict[str, int]:
    """Returns the same of a DeepSpeed configuration, where experts need their switch besides."""
    found = degrees_of(value_at)
    return found if value_at(EXPERTS_SPLIT) else {path: n for path, n in found.items() if path != EXPERT_DEGREE}


def ranks_per_replica(degrees: Mapping[str, int]) -> int:
    """Returns the ranks that train on the same samples, at some degrees by path."""
    return math.prod(max(1, degrees.get(path, 1)) for path in REPLICA_DEGREES)
