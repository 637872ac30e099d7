"""Tensors in nested containers: find them, replace them, move them to a device; and the elements of a parameter."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

# Floating-point types, by the names of precisions.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def coarse_dtype(loss: Tensor) -> str:
    """Returns the type of a loss by its name if it has 16 bits; else an empty text."""
    return str(loss.dtype).removeprefix("torch.") if loss.dtype in (torch.bfloat16, torch.float16) else ""


def tensors_in(value: Any, *, objects: bool = False) -> Iterator[Tensor]:
    """Yields the tensors in nested mappings, sequences, sets and modules.

    Args:
        objects: Also those that batches in classes of their own hold; see `held_by`.
    """
    pending = [value]
    while pending:  # no recursion, and the commonest types first: it runs in every step of a trial
        value = pending.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple | set):
            pending += [*value][::-1]
        elif isinstance(value, nn.Module):
            pending += [*value.state_dict().values()][::-1]
        elif isinstance(value, (dict, Mapping)):
            pending += [*value.values()][::-1]
        elif objects:
            pending += [*held_by(value).values()][::-1]


def held_by(value: Any) -> Mapping[str, Any]:
    """Returns the tensors and arrays that an object of a user's or library's class holds by name, as a batch of graphs does.

    Other objects that it holds are not looked into: they may lead to all that there is.
    """
    if value is None or isinstance(value, int | float | str | bytes | type | nn.Module):
        return {}
    return {
        name: inner
        for name, inner in getattr(value, "__dict__", {}).items()
        if not isinstance(inner, nn.Module) and (hasattr(inner, "shape") or next(tensors_in(inner), None) is not None)
    }


def n_elements(parameter: Tensor) -> int:
    """Returns the elements of a parameter, also of one that ZeRO-3 shares out: the rank holds an empty tensor then."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def number_in(tensor: Tensor) -> Tensor | float:
    """Returns the one number of a tensor, or the tensor if it is a device's, since reading that would wait for it.

    On a CPU nothing of the heap is kept so: a small block that outlives its step has the C library hand back, and fault in
    anew, hundreds of pages in each of the next ones.
    """
    return tensor.detach().reshape(()) if tensor.device.type != "cpu" else tensor.item()


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Returns a copy of nested mappings and sequences with every tensor changed; mappings become dicts."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(inner, change) for key, inner in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(inner, change) for inner in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(inner, change) for inner in value)
    return value


def to_device(batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Returns a batch on a device; floating-point tensors also become `dtype`, which 16-bit weights need."""

    def move(tensor: Tensor) -> Tensor:
        tensor = tensor.to(device, non_blocking=True)
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    return map_tensors(batch, move)
