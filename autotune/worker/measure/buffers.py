"""Buffers that a model changes as it goes forward, as an EMA codebook: by micro-batches, and twice where that is recomputed."""

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

# Module and name of a buffer.
Key: TypeAlias = tuple[nn.Module, str]
# Shape, values of floats, and what else a change changes.
Marks: TypeAlias = dict[Key, tuple[Any, ...]]


class BufferWatch:
    """Notes which modules change a buffer in a training forward, from the second one on: the first may make some, as masks.

    Norms do not count: what they train by is the batch alone.

    Attributes:
        changed: These modules.
        of_floats: Those in which the values of floats are others than before.
    """

    def __init__(self, model: nn.Module) -> None:
        self.changed: set[nn.Module] = set()
        self.of_floats: set[nn.Module] = set()
        self._before: Marks = {}
        self._model, self._begun = model, False
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)

    def __deepcopy__(self, _memo: object) -> Self:
        """A deep copy of the model, as for an average of its weights, must not copy what its hooks hold."""
        return self

    def _trains(self, model: nn.Module) -> bool:
        compiled = torch.compiler.is_compiling()  # hooks within a graph would cut it
        return not compiled and model is self._model and model.training and torch.is_grad_enabled()

    def _begin(self, model: nn.Module, _args: Any) -> None:
        if self._trains(model):
            self._before = _marks(model) if self._begun else {}

    def _end(self, model: nn.Module, *_: Any) -> None:
        if not self._trains(model):
            return
        self._begun = True
        now = _marks(model) if self._before else {}
        for key in self._before.keys() & now.keys():
            (shape, values, *rest), (shape_now, values_now, *rest_now) = self._before[key], now[key]
            if shape == shape_now:  # a longer sequence may make a table longer
                self.changed |= {key[0]} if (values, rest) != (values_now, rest_now) else set()
                self.of_floats |= {key[0]} if values != values_now else set()
        self._before = {}


def of(model: nn.Module) -> dict[Key, Tensor]:
    """Returns the buffers of a model, without those of norms."""
    modules = (module for module in model.modules() if not isinstance(module, _NormBase))
    return {(each, name): buffer for each in modules for name, buffer in each._buffers.items() if buffer is not None}


def changed(
    model: nn.Module, before: Mapping[Key, Tensor], written: Container[int]
) -> Iterator[tuple[nn.Module, Tensor]]:
    """Yields modules with a buffer that is another one than before, or in a storage that was written to, and that buffer."""
    for key, buffer in of(model).items():
        old = before.get(key)
        if old is None or old.shape != buffer.shape:
            continue
        plain = buffer.layout is torch.strided
        if old is not buffer or (plain and buffer.untyped_storage()._cdata in written):
            yield key[0], buffer


def said(again: str, floats: str) -> list[str]:
    """Returns what to know of the classes in blocks that change buffers, and of those that change buffers of floats."""
    found = []
    if again:
        found.append(
            f"{again} changes a buffer as it goes forward, and again where it is recomputed: each other recomputation is checked,"
            " and none is drop-in"
        )
    if floats:
        found.append(
            f"{floats} changes a buffer of floats with each micro-batch, as a moving average does: each other micro-batch is checked,"
            " and none is drop-in"
        )
    return found


def classes(modules: Iterable[nn.Module]) -> str:
    """Returns the classes of modules, as a list in words."""
    return ", ".join(sorted({type(module).__name__ for module in modules}))


def _marks(model: nn.Module) -> Marks:
    return {
        key: (buffer.shape, _values(buffer), id(buffer), None if buffer.is_inference() else buffer._version)
        for key, buffer in of(model).items()
    }


@torch.no_grad()
def _values(buffer: Tensor) -> str:
    """Returns a text that other values change, of floats: a change through `buffer.data` leaves the version as it was."""
    plain = type(buffer) is Tensor and buffer.layout is torch.strided and not buffer.is_meta
    if not plain or not buffer.is_floating_point() or buffer.itemsize < 2:
        return ""
    return str(torch.linalg.vector_norm(buffer, dtype=torch.float32 if buffer.itemsize < 4 else None).item())
