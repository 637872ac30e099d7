"""The shape of a data set: types and shapes of its samples' tensors, and the distribution of lengths."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autotune.trial.workload import DataShape
from autotune.worker.model import model_file

# Samples to draw: evenly spread over a data set, or the first ones of a stream; and the seconds for them.
MAX_SAMPLES, MAX_STREAMED, BUDGET_S = 256, 64, 2.0


def data_shape(loader: model_file.Loader) -> DataShape | None:
    """Returns the shape of a target's data; None if drawing it fails, which trials will report."""
    try:
        return describe(_some(loader.samples()))
    except Exception:
        return None


def describe(samples: Iterator[Any]) -> DataShape | None:
    """Returns the shape of the samples that come within the time budget; None without any."""
    until = time.monotonic() + BUDGET_S
    kinds: dict[str, list[tuple[int, ...]]] = {}
    dtypes: dict[str, str] = {}
    lengths: Counter[int] = Counter()
    for sample in samples:
        sizes = [1]
        for name, shape, dtype in _fields(sample, ""):
            kinds.setdefault(name, []).append(shape)
            dtypes[name] = dtype
            sizes += shape
        lengths[_edge(max(sizes))] += 1
        if time.monotonic() > until:
            break
    n = sum(lengths.values())
    if not n:
        return None
    return DataShape(
        fields=tuple(f"{name}{dtypes[name]}[{_common(shapes)}]" for name, shapes in sorted(kinds.items())),
        lengths={str(edge): count / n for edge, count in sorted(lengths.items())},
        n_seen=n,
    )


def _some(samples: Any) -> Iterator[Any]:
    """Yields samples evenly spread over a data set, or the first ones of a stream."""
    if not hasattr(samples, "__getitem__"):
        yield from itertools.islice(samples, MAX_STREAMED)
        return
    n = len(samples)
    for index in dict.fromkeys(round(k * (n - 1) / max(1, MAX_SAMPLES - 1)) for k in range(MAX_SAMPLES)):
        yield samples[index]


def _fields(value: Any, name: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yields name, shape and type of each tensor, array or list of numbers in a sample."""
    if isinstance(value, Tensor) or hasattr(value, "shape"):
        yield f"{name} ".lstrip(), tuple(int(size) for size in value.shape), str(value.dtype).removeprefix("torch.")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _fields(inner, f"{name}.{key}".lstrip("."))
    elif isinstance(value, (list, tuple)) and value and isinstance(value[0], (int, float)) and isinstance(value, list):
        yield f"{name} ".lstrip(), (len(value),), type(value[0]).__name__
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _fields(inner, f"{name}.{index}".lstrip("."))
    elif isinstance(value, (int, float)):
        yield f"{name} ".lstrip(), (), type(value).__name__
    elif isinstance(value, str):
        yield f"{name} ".lstrip(), (len(value),), "text"


def _common(shapes: Sequence[tuple[int, ...]]) -> str:
    """Returns one shape for all, with a star for sizes that differ."""
    if len({len(shape) for shape in shapes}) > 1:
        return "*"
    return ",".join(str(sizes[0]) if len(set(sizes)) == 1 else "*" for sizes in zip(*shapes, strict=True))


def _edge(length: int) -> int:
    """Returns the upper edge of the class that a length falls into; there are two classes per doubling."""
    return math.ceil(2 ** (math.ceil(2 * math.log2(length)) / 2) - 1e-9) if length > 1 else 1


def of_batch(args: Sequence[Any], kwargs: Mapping[str, Any], n: int) -> list[Any]:
    """Returns empty samples with the shapes of a batch of n: its tensors of n rows, without that dimension."""
    tensors = [
        value
        for value in [*args, *kwargs.values()]
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == n
    ]
    sample = [torch.empty(tensor.shape[1:], dtype=tensor.dtype, device="meta") for tensor in tensors]
    return [sample] * n if tensors else []
