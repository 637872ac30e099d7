"""The user's `model.py` in a rank: load it, build what it defines, feed it data in one fixed order."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from autotune import UserError


class WorkloadError(UserError):
    """The user's target does not keep the contract."""


@dataclass
class Target:
    """The functions of a `model.py`, the optional ones None where it does not define them."""

    path: Path
    model: Callable[[], nn.Module]
    data: Callable[[], Any] | None
    batch: Callable[[int], Any] | None
    loss: Callable[[Any, Any], Tensor] | None
    optimizer: Callable[[Any], torch.optim.Optimizer] | None
    collate: Callable[[list[Any]], Any] | None
    blocks: Sequence[Any] | None


def load(path: Path) -> Target:
    """Executes the user's file as a module of its own.

    Raises:
        WorkloadError: A required function is missing.
    """
    module = _execute(path)
    functions = {
        name: getattr(module, name, None) for name in ("model", "data", "batch", "loss", "optimizer", "collate")
    }
    if not callable(functions["model"]):
        raise WorkloadError(f"{path.name}: define model() -> nn.Module")
    if not callable(functions["data"]) and not callable(functions["batch"]):
        raise WorkloadError(f"{path.name}: define data() -> Dataset, or batch(n) -> a batch of n samples")
    return Target(path=path, blocks=getattr(module, "blocks", None), **functions)  # type: ignore[arg-type]


def _execute(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.parent))
    name = path.stem if path.stem not in sys.modules and path.stem.isidentifier() else "autotune_target"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise WorkloadError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that its classes can be pickled
    spec.loader.exec_module(module)
    return module


def build_model(target: Target) -> nn.Module:
    """Calls `model()` and checks what came.

    Raises:
        WorkloadError: It is not a module.
    """
    model = target.model()
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"{target.path.name}: model() returned {type(model).__name__}, not an nn.Module")
    return model


class Loader:
    """Micro-batches of one rank, in an order that depends on nothing but the seed.

    Optimizer step t of every candidate with global batch B trains on the samples [t B, (t + 1) B) of one fixed sequence (a
    new permutation each epoch), whatever the split into ranks, micro-batches and accumulation; so loss curves of
    candidates are paired.

    Args:
        target: The user's functions.
        micro_batch_size: Samples per micro-batch of one rank.
        rank: This rank.
        world_size: Ranks.
        seed: Seed of the order.
        first_sample: Where in the order to start.
    """

    def __init__(
        self, target: Target, *, micro_batch_size: int, rank: int, world_size: int, seed: int, first_sample: int = 0
    ) -> None:
        self.micro_batch_size = micro_batch_size
        self.n_samples: int | None = None
        self._rank, self._world_size, self._seed = rank, world_size, seed
        self._collate = target.collate or _default_collate
        self._next_sample = first_sample
        self._orders: dict[int, Tensor] = {}
        self._batch = target.batch if target.data is None else None
        self._dataset: Any = None
        self._stream: Iterator[Any] | None = None
        if target.data is not None:
            self._dataset = _dataset(target)
            if _is_map_style(self._dataset):
                self.n_samples = len(self._dataset)
            else:
                self._stream = itertools.islice(_endless(self._dataset, target.path.name), first_sample, None)
        else:
            torch.manual_seed(
                seed * 1_000_003 + rank + first_sample
            )  # batch(n) draws at random: other samples on every rank

    def check(self, global_batch_size: int) -> None:
        """Refuses a data set that cannot fill one optimizer step.

        Raises:
            WorkloadError: It is smaller than the global batch.
        """
        if self.n_samples is not None and self.n_samples < global_batch_size:
            raise WorkloadError(
                f"data() has {self.n_samples} samples, but one optimizer step needs {global_batch_size}"
            )

    def next(self) -> tuple[Any, int | None]:
        """The next micro-batch of this rank, and the samples drawn for it (None for `batch(n)`)."""
        if self._batch is not None:
            return self._batch(self.micro_batch_size), None
        first = self._next_sample + self._rank * self.micro_batch_size
        chunk = self.micro_batch_size * self._world_size
        if self._stream is not None:
            samples = list(itertools.islice(self._stream, chunk))[self._rank * self.micro_batch_size :][
                : self.micro_batch_size
            ]
        else:
            samples = [self._dataset[self._index(position)] for position in range(first, first + self.micro_batch_size)]
        self._next_sample += chunk
        return self._collate(samples), len(samples)

    def samples(self) -> Any:
        """The samples themselves: a data set, an iterator, or for `batch(n)` those of one small batch."""
        if self._batch is None:
            return self._dataset if self._stream is None else iter(self._dataset)
        batch = self._batch(2)
        return iter([_part(batch, 0), _part(batch, 1)])

    def _index(self, position: int) -> int:
        assert self.n_samples is not None
        epoch, offset = divmod(position, self.n_samples)
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._orders = {epoch: torch.randperm(self.n_samples, generator=generator)} | {
                known: order for known, order in self._orders.items() if known >= epoch - 1
            }
        return int(self._orders[epoch][offset])


def _part(batch: Any, index: int) -> Any:
    """One sample of a batch, as far as its tensors show which it is."""
    if isinstance(batch, Tensor):
        return batch[index] if batch.dim() else batch
    if isinstance(batch, Mapping):
        return {key: _part(value, index) for key, value in batch.items()}
    return [_part(value, index) for value in batch] if isinstance(batch, (list, tuple)) else batch


def _dataset(target: Target) -> Any:
    assert target.data is not None
    dataset = target.data()
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise WorkloadError(
            f"{target.path.name}: data() returned a DataLoader; return its dataset, since the tuner chooses the batch size"
        )
    if not _is_map_style(dataset) and not hasattr(dataset, "__iter__"):
        raise WorkloadError(
            f"{target.path.name}: data() returned {type(dataset).__name__}; return a Dataset or a list of samples"
        )
    if _is_map_style(dataset) and len(dataset) == 0:
        raise WorkloadError(f"{target.path.name}: data() is empty")
    return dataset


def _is_map_style(dataset: Any) -> bool:
    if isinstance(dataset, torch.utils.data.IterableDataset):
        return False
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def _endless(dataset: Any, name: str) -> Iterator[Any]:
    while True:
        empty = True
        for sample in dataset:
            empty = False
            yield sample
        if empty:
            raise WorkloadError(f"{name}: data() yields no sample")


def _default_collate(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate(samples)


def to_device(batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Moves a batch to the device; its floating tensors to `dtype` too, as a model with 16-bit weights needs them."""
    if isinstance(batch, Tensor):
        batch = batch.to(device, non_blocking=True)
        return batch.to(dtype) if dtype is not None and batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {key: to_device(value, device, dtype) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device, dtype) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device, dtype) for value in batch)
    return batch


def make_loss(target: Target, model: nn.Module) -> Callable[[Any, Any], Tensor]:
    """The user's `loss(model, batch)`, or the default one.

    By default a dict is passed by keyword, a tensor alone, a tuple (x, y) as `model(x)`, or as `model(x, y)` where the model
    takes targets; the loss is the output's own (`.loss`, `["loss"]`, a scalar), else cross-entropy for integer y and
    mean squared error otherwise.
    """
    if target.loss is not None:
        return target.loss
    takes_targets = _takes_targets(model)

    def loss(engine: Any, batch: Any) -> Tensor:
        if isinstance(batch, Mapping):
            return _loss_of(engine(**batch), batch.get("labels"))
        if isinstance(batch, (list, tuple)) and len(batch) == 1:
            batch = batch[0]
        if not isinstance(batch, (list, tuple)):
            return _loss_of(engine(batch), None)
        if takes_targets or len(batch) != 2:
            return _loss_of(engine(*batch), batch[-1])
        return _loss_of(engine(batch[0]), batch[1])

    return loss


def _takes_targets(model: nn.Module) -> bool:
    parameters = list(inspect.signature(model.forward).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2:
        return False
    return positional[1].default is inspect.Parameter.empty or positional[1].name in {
        "y",
        "label",
        "labels",
        "target",
        "targets",
    }


def _loss_of(output: Any, target: Any) -> Tensor:
    for candidate in (
        getattr(output, "loss", None),
        output.get("loss") if isinstance(output, Mapping) else None,
        output,
    ):
        if isinstance(candidate, Tensor) and candidate.dim() == 0:
            return candidate
    values = (
        list(output.values())
        if isinstance(output, Mapping)
        else list(output)
        if isinstance(output, (list, tuple))
        else [output]
    )
    scalars = [value for value in values if isinstance(value, Tensor) and value.dim() == 0 and value.requires_grad]
    if len(scalars) == 1:
        return scalars[0]
    if not isinstance(target, Tensor) or not values or not isinstance(values[0], Tensor):
        raise WorkloadError("the model's output holds no loss; define loss(model, batch) -> scalar tensor")
    prediction = values[0].float()
    if target.is_floating_point():
        return nn.functional.mse_loss(
            prediction.reshape(target.shape) if prediction.numel() == target.numel() else prediction, target.float()
        )
    if target.dim() == prediction.dim() - 1 and target.dim() > 1 and target.shape == prediction.shape[:-1]:
        return nn.functional.cross_entropy(prediction.flatten(0, -2), target.flatten())
    return nn.functional.cross_entropy(prediction, target)


def find_blocks(model: nn.Module, named: Sequence[Any] | None) -> list[nn.Module]:
    """The repeated blocks whose activations can be recomputed, outermost ones only.

    Without `blocks` in the target: direct children of a ModuleList or Sequential that are not leaves and whose class
    occurs there at least twice. Several such classes (encoder and decoder layers) are all taken.

    Args:
        model: The model.
        named: The target's `blocks`: class names or classes.
    """
    if named:
        names = {block if isinstance(block, str) else block.__name__ for block in named}
        found = [module for module in model.modules() if type(module).__name__ in names]
        if not found:
            raise WorkloadError(f"blocks = {sorted(names)}: the model has no module of such a class")
    else:
        children = [
            child
            for parent in model.modules()
            if isinstance(parent, (nn.ModuleList, nn.Sequential))
            for child in parent.children()
            if any(True for _ in child.children()) and not isinstance(child, nn.ModuleList)
        ]
        counts: dict[type, int] = {}
        for child in children:
            counts[type(child)] = counts.get(type(child), 0) + 1
        found = [child for child in children if counts[type(child)] > 1]
    inner = {id(below) for block in found for below in block.modules() if below is not block}
    return list(dict.fromkeys(block for block in found if id(block) not in inner))
