"""Tensors in nested containers: find them, replace them, move them to a device; and the elements of a parameter."""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

# Floating-point types, by the names of precisions.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Whether to look into objects that are no containers: into all or none, or into those of which a function says so.
Objects = bool | Callable[[Any], bool]


def coarse_dtype(loss: Tensor) -> str:
    """Returns the type of a loss by its name if it has 16 bits; else an empty text."""
    return str(loss.dtype).removeprefix("torch.") if loss.dtype in (torch.bfloat16, torch.float16) else ""


def tensors_in(value: Any, *, objects: Objects = False) -> Iterator[Tensor]:
    """Yields the tensors in nested mappings, sequences, sets and modules.

    Args:
        objects: Also those that batches in classes of their own hold, all or some; see `held_by`.
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
        elif objects is True or (objects and objects(value)):
            pending += [*held_by(value).values()][::-1]


def held_by(value: Any) -> Mapping[str, Any]:
    """Returns the tensors and arrays that an object of a user's or library's class holds by name, as a batch of graphs does.

    Other objects that it holds are not looked into: they may lead to all that there is.
    """
    if value is None or isinstance(value, int | float | str | bytes | type | nn.Module):
        return {}
    slots = dataclasses.fields(value) if dataclasses.is_dataclass(value) and not hasattr(value, "__dict__") else ()
    held = getattr(value, "__dict__", {}) or {field.name: getattr(value, field.name, None) for field in slots}
    return {
        name: inner
        for name, inner in held.items()
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


def map_tensors(value: Any, change: Callable[[Tensor], Any], *, objects: Objects = False) -> Any:
    """Returns a copy of nested mappings and sequences with every tensor changed; mappings that can be copied keep their class.

    Args:
        objects: Also of batches in classes of their own, all or some; see `held_by`.
    """
    if isinstance(value, Tensor):
        return change(value)
    again = functools.partial(map_tensors, change=change, objects=objects)
    if isinstance(value, Mapping):
        return with_values(value, {key: again(inner) for key, inner in value.items()})
    if isinstance(value, PackedSequence):  # which has its sizes on the host
        return type(value)(again(value.data), value.batch_sizes, *map(again, value[2:]))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(again, value))
    if isinstance(value, list | tuple):
        return type(value)(map(again, value))
    wanted = objects is True or (objects and objects(value))
    return _with_changed(value, change) if wanted and held_by(value) else value


def with_values(mapping: Mapping[Any, Any], changed: dict[Any, Any]) -> Mapping[Any, Any]:
    """Returns a copy of a mapping in its class with other values; these as a dict where the class does not take them as they are.

    A plain copy shares the dict in which a class keeps its values, and what such a class has as attributes, too, stays as it was.
    """
    if type(mapping) is dict or not isinstance(mapping, MutableMapping):
        return changed
    with contextlib.suppress(Exception):  # what the user's class does is not known
        copied = copy.copy(mapping)
        held = vars(copied) if hasattr(copied, "__dict__") else {}
        for name, inner in list(held.items()):
            if name in changed and inner is mapping[name]:
                held[name] = changed[name]
            elif isinstance(inner, dict):
                held[name] = copy.copy(inner)
        for key, inner in changed.items():
            copied[key] = inner
        if all(copied[key] is inner for key, inner in changed.items() if isinstance(inner, Tensor)):
            return copied
    return changed


def _with_changed(batch: Any, change: Callable[[Tensor], Any]) -> Any:
    """Returns a copy of a batch in a class that is no container, with the tensors that it holds changed."""
    copied = copy.copy(batch)
    for name, inner in held_by(copied).items():
        object.__setattr__(copied, name, map_tensors(inner, change))
    return copied


def to_device(batch: Any, device: torch.device, dtype: torch.dtype | None, *, objects: Objects = True) -> Any:
    """Returns a batch on a device; floating-point tensors also become `dtype`, which 16-bit weights need.

    Args:
        objects: As of `map_tensors`.
    """

    def move(tensor: Tensor) -> Tensor:
        tensor = tensor.to(device, non_blocking=True)
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    return map_tensors(batch, move, objects=objects)
