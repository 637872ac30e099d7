"""The user's DataLoaders in a trial: their batch size, and how many samples each of their batches was drawn from."""

from __future__ import annotations

import collections
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autotune.worker.patching import patch

if TYPE_CHECKING:
    from autotune.worker.hooks import Hooks


class Loaders:
    """Gives the loaders of the user's own code the trial's micro-batch, and counts what all of them draw.

    Args:
        hooks: What the trial knows.
    """

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks

    def install(self) -> None:
        """Patches torch's loader."""
        patch(torch.utils.data.DataLoader, "__init__", self._init)
        self._count_draws()

    def _init(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(original).bind(*args, **kwargs)
        place, change = users_caller(), self._hooks.value("micro_batch_size")
        if place and change:
            was, wanted = (self._hooks.batch_factor * size for size in change)
            sampler = bound.arguments.get("batch_sampler")
            if sampler is not None and getattr(sampler, "batch_size", None) == was:
                sampler.batch_size = wanted
                self._hooks.changed(
                    f"Data: the batch sampler of the DataLoader at {place} with batch size {wanted} instead of {was}."
                )
            elif sampler is None and bound.arguments.get("batch_size", 1) == was:
                bound.arguments["batch_size"] = wanted
                _remember(bound.arguments["self"], wanted)
                self._hooks.changed(f"Data: the DataLoader at {place} with `batch_size={wanted}` instead of {was}.")
        original(*bound.args, **bound.kwargs)

    def _count_draws(self) -> None:
        """Counts the samples of each batch where a loader draws their indices: a leading dimension can be something else."""
        from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

        def next_index(original: Callable[..., Any], iterator: Any) -> Any:
            index = original(iterator)
            queue = iterator.__dict__.setdefault("_autotune_draws", collections.deque())
            # What is drawn from a stream is what is asked for; its end has less.
            known = hasattr(index, "__len__") and iterator._dataset_kind != _DatasetKind.Iterable
            queue.append(len(index) if known else None)
            return index

        def next_batch(original: Callable[..., Any], iterator: Any) -> Any:
            batch = original(iterator)
            queue = iterator.__dict__.get("_autotune_draws")
            if self._hooks.meter is not None:
                self._hooks.meter.batches.drew(queue.popleft() if queue else None)
            elif queue:
                queue.popleft()
            return batch

        def reset(original: Callable[..., Any], iterator: Any, *args: Any, **kwargs: Any) -> Any:
            iterator.__dict__.pop("_autotune_draws", None)  # of an epoch that was left early
            return original(iterator, *args, **kwargs)

        patch(_BaseDataLoaderIter, "_reset", reset)
        patch(_BaseDataLoaderIter, "_next_index", next_index)
        patch(_BaseDataLoaderIter, "__next__", next_batch)


def _remember(loader: Any, batch_size: int) -> None:
    """Lightning makes a loader anew for its own sampler, from the arguments that it noted."""
    noted, names = getattr(loader, "__pl_saved_kwargs", None), getattr(loader, "__pl_saved_arg_names", ())
    if noted is None:
        return
    if "batch_size" in noted or "batch_size" not in names[: len(loader.__pl_saved_args)]:
        object.__setattr__(loader, "__pl_saved_kwargs", {**noted, "batch_size": batch_size})
    else:
        given = list(loader.__pl_saved_args)
        given[names.index("batch_size")] = batch_size
        object.__setattr__(loader, "__pl_saved_args", tuple(given))


def users_caller() -> str | None:
    """`file:line` of the nearest caller outside torch, DeepSpeed and us, if that is the user's own code."""
    frame = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not f"{module}.".startswith(_TRANSPARENT):
            path = os.path.abspath(frame.f_code.co_filename)
            installed = any(path.startswith(folder) for folder in _INSTALLED)
            return None if installed else f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None


# Modules that only pass a call on: ours, and where Lightning notes the arguments of loaders.
_TRANSPARENT = (
    "torch.",
    "autotune.",
    "functools.",
    "contextlib.",
    "lightning.fabric.utilities.data.",
    "lightning_fabric.utilities.data.",
)
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
