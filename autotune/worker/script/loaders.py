"""DataLoaders in a trial: give them the trial's batch size, and count the samples of each batch they draw."""

from __future__ import annotations

import collections
import inspect
from collections.abc import Callable
from typing import Any

import torch

from autotune.worker.script.context import ScriptContext
from autotune.worker.script.patching import patch, users_caller


class Loaders:
    """Hooks on torch's DataLoader."""

    def __init__(self, context: ScriptContext) -> None:
        self._context = context

    def install(self) -> None:
        """Patches torch's loader and its iterators.

        Samples are counted where a loader draws their indices, since the leading dimension of a batch may mean
        something else.
        """
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        patch(torch.utils.data.DataLoader, "__init__", self._init)
        patch(_BaseDataLoaderIter, "_reset", self._reset)
        patch(_BaseDataLoaderIter, "_next_index", self._next_index)
        patch(_BaseDataLoaderIter, "__next__", self._next_batch)

    def _init(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(original).bind(*args, **kwargs)
        place, change = users_caller(), self._context.drawn()
        if place and change:
            was, wanted = change
            sampler = bound.arguments.get("batch_sampler")
            if sampler is not None and getattr(sampler, "batch_size", None) == was:
                sampler.batch_size = wanted
                self._context.changed(
                    f"Data: the batch sampler of the DataLoader at {place} with batch size {wanted} instead of {was}."
                )
            elif sampler is None and bound.arguments.get("batch_size", 1) == was:
                bound.arguments["batch_size"] = wanted
                _tell_lightning(bound.arguments["self"], wanted)
                self._context.changed(f"Data: the DataLoader at {place} with `batch_size={wanted}` instead of {was}.")
        original(*bound.args, **bound.kwargs)

    def _next_index(self, original: Callable[..., Any], iterator: Any) -> Any:
        from torch.utils.data.dataloader import _DatasetKind

        index = original(iterator)
        queue = iterator.__dict__.setdefault("_autotune_draws", collections.deque())
        # From a stream the last draw may yield fewer samples than it asks for.
        known = hasattr(index, "__len__") and iterator._dataset_kind != _DatasetKind.Iterable
        queue.append(len(index) if known else None)
        return index

    def _next_batch(self, original: Callable[..., Any], iterator: Any) -> Any:
        meter = self._context.meter
        try:
            batch = original(iterator)
        except StopIteration:
            if meter is not None:
                meter.batches.ended()
            raise
        queue = iterator.__dict__.get("_autotune_draws")
        n_samples = queue.popleft() if queue else None
        if meter is not None:
            meter.batches.drew(n_samples, batch)
        return batch

    def _reset(self, original: Callable[..., Any], iterator: Any, *args: Any, **kwargs: Any) -> Any:
        iterator.__dict__.pop("_autotune_draws", None)  # of an epoch that was left early
        return original(iterator, *args, **kwargs)


def _tell_lightning(loader: Any, batch_size: int) -> None:
    """Changes the arguments that Lightning noted, from which it makes the loader anew for its own sampler."""
    noted, names = getattr(loader, "__pl_saved_kwargs", None), getattr(loader, "__pl_saved_arg_names", ())
    if noted is None:
        return
    if "batch_size" in noted or "batch_size" not in names[: len(loader.__pl_saved_args)]:
        object.__setattr__(loader, "__pl_saved_kwargs", {**noted, "batch_size": batch_size})
    else:
        given = list(loader.__pl_saved_args)
        given[names.index("batch_size")] = batch_size
        object.__setattr__(loader, "__pl_saved_args", tuple(given))
