"""Degrees: over how many ranks a model or its sequences are split; ranks of one group share a copy of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Paths of DeepSpeed's configuration; leaving one out is a degree of 1.
TENSOR_DEGREE, SEQUENCE_DEGREE = "tensor_parallel.autotp_size", "sequence_parallel_size"
PIPELINE_DEGREE = "pipeline.stages"
DEGREES = (TENSOR_DEGREE, SEQUENCE_DEGREE, PIPELINE_DEGREE)
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
