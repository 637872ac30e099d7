"""DataLoaders in a trial: give them the trial's batch size, and count the samples of each batch they draw."""

import ast
import collections
import contextlib
import inspect
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch

from autotune.space import data
from autotune.trial.request import TailCheck
from autotune.worker.data import change as change_data
from autotune.worker.data import worst
from autotune.worker.data.samples import fixed_sizes, is_map_style, samples_in
from autotune.worker.data.witness import watch
from autotune.worker.script.context import ScriptContext
from autotune.worker.script.patching import patch, place_of, syntax_of, users_frame


class Loaders:
    """Hooks on torch's DataLoader."""

    def __init__(self, context: ScriptContext) -> None:
        self._context = context
        self._trained: collections.Counter[int] = collections.Counter()  # training forwards by data set
        self._latest: dict[int, Any] = {}  # iterators by data set, the one drawn from last at the end
        self._drawn: dict[int, None] = {}  # data sets that were drawn from since the last forward
        self._largest: dict[int, tuple[int, Any]] = {}  # sizes and batches by data set
        self._n_samples: dict[int, int] = {}  # samples of the largest draw by data set
        self._changes: dict[int, list[str]] = {}  # of loaders, by data set; told of those that are trained on
        self._worst: Any = None
        context.loaders = watch.loaders = self

    @property
    def trained(self) -> Any:
        """Returns the latest iterator over the data set that is mostly trained on; None without a loader.

        Until a batch goes forward, that is the one that was drawn from last.
        """
        if self._trained:
            return self._latest[max(self._trained, key=self._trained.__getitem__)]
        return next(reversed(self._latest.values()), None)

    def went_forward(self, *, trains: bool) -> None:
        """Notes a forward call of the engine; one that does not train was an evaluation's."""
        if trains:
            self._trained.update([*self._drawn])
            self._tell_changes(self._drawn)
        self._drawn.clear()

    def _tell_changes(self, places: Iterable[int]) -> None:
        """Notes what was changed of loaders; one that is evaluated alone may draw as many samples by chance."""
        for place in places:
            for text in self._changes.pop(place, ()):
                self._context.changed(text)

    def draws(self) -> tuple[int, ...]:
        """Returns the samples that each loader drew for a micro-batch, of those that fed more than one."""
        # One that `itertools.cycle` repeats is drawn from in its first round alone.
        return tuple(self._n_samples[place] for place, n in self._trained.items() if n > 1)

    def feed_worst(self, check: TailCheck) -> Any:
        """Makes loaders of the trained data set yield the worst batch from now on.

        Returns:
            That batch; None where nothing was drawn from a loader.
        """
        iterator, meter = self.trained, self._context.meter
        if iterator is None or meter is None:
            return None
        _, largest = self._largest[id(iterator._dataset)]
        if meter.batches.uneven:
            if check.length:
                self._context.once("the script decides how long its batches are, so --max-length was not tried")
            self._worst = worst.heaviest(iterator, largest, fixed_sizes(meter.batches.noted.shapes))
            return self._worst
        self._worst = self._longest(iterator, meter.batches.draw_size, check)
        return self._worst

    def _longest(self, iterator: Any, n: int, check: TailCheck) -> Any:
        """Returns a batch of the n longest samples, or of a stream the largest batch, stretched."""
        meter, dataset, collate = self._context.meter, iterator._dataset, iterator._collate_fn
        fixed = fixed_sizes(meter.batches.noted.shapes) if meter is not None else frozenset()
        if not (iterator._auto_collation and check.longest_at and n and is_map_style(dataset)):
            _, largest = self._largest[id(dataset)]
            return worst.stretched(largest, worst.rows_of(largest), check.length, fixed)
        try:
            return worst.batch_of(dataset, collate, check.longest_at, n, check.length, fixed)
        except Exception as error:
            if not check.length:
                raise
            packs = meter is not None and meter.batches.flattened
            why = "the script packs rows of a length that it chooses" if packs else f"the script collates none: {error}"
            self._context.once(f"longer samples were not tried (--max-length): {why}")
            return worst.batch_of(dataset, collate, check.longest_at, n, 0)

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
        # A library passes on what the user's code says, where a framework takes it from its configuration.
        frame, change = users_frame(through_libraries=True), self._context.drawn()
        place = place_of(frame)
        said = self._changes.setdefault(id(bound.arguments["dataset"]), [])
        if place and change:
            was, wanted = change
            sampler = bound.arguments.get("batch_sampler")
            if sampler is not None and getattr(sampler, "batch_size", None) == was:
                sampler.batch_size = wanted
                plain = type(sampler) is torch.utils.data.BatchSampler
                said.append(
                    f"Data: the batch sampler of the DataLoader at {place} with batch size {wanted} instead of {was}"
                    f"{'' if plain else ', with which it may put other samples together'}."
                )
            elif sampler is None and bound.arguments.get("batch_size", 1) == was:
                bound.arguments["batch_size"] = wanted
                _tell_lightning(bound.arguments["self"], wanted)
                said.append(
                    f"Data: the DataLoader at {place} with `batch_size={wanted}` instead of {was}{_by_name(frame)}."
                )
        changes = self._context.candidate.data_changes if self._context.candidate is not None else {}
        for name, value in changes.items():
            # A loader of the script's own does not look at what its framework was told.
            carried = [] if place else self._context.data_by_framework.get(name, [])
            for words in carried or [data.in_words(name, value)]:
                self._context.changed(words)
        change_data.apply_to(bound.arguments, {
            name: value for name, value in changes.items()
            if place or name in data.OF_LOADER or name not in self._context.data_by_framework
        })  # fmt: skip
        original(*bound.args, **bound.kwargs)

    def _next_index(self, original: Callable[..., Any], iterator: Any) -> Any:
        index = original(iterator)
        queue = iterator.__dict__.get("_autotune_draws")
        if queue is None:
            queue = iterator.__dict__["_autotune_draws"] = collections.deque()
        # From a stream the last draw may yield fewer samples than it asks for.
        known = hasattr(index, "__len__") and not isinstance(iterator._dataset, torch.utils.data.IterableDataset)
        queue.append(len(index) if known else None)
        return index

    def _next_batch(self, original: Callable[..., Any], iterator: Any) -> Any:
        meter = self._context.meter
        try:
            with meter.loading() if meter is not None else contextlib.nullcontext():
                batch = original(iterator)
        except StopIteration:
            if meter is not None:
                meter.batches.ended()
            raise
        queue = iterator.__dict__.get("_autotune_draws")
        n_samples = queue.popleft() if queue else None
        place = id(iterator._dataset)
        self._n_samples[place] = max(n_samples or 0, self._n_samples.get(place, 0))
        batch = self._noted(iterator, batch)
        in_rows = self._context.in_rows and iterator is self.trained
        if in_rows:
            n_samples = samples_in(batch)
        if meter is not None and self._context.trains_on_draws:
            varies = in_rows or (_vary(iterator, n_samples) and iterator is self.trained)
            meter.batches.drew(n_samples, batch, varies=varies)
        return batch

    def _noted(self, iterator: Any, batch: Any) -> Any:
        """Notes a batch; returns it, or the worst one in its place during the tail check."""
        place = id(iterator._dataset)
        self._latest.pop(place, None)
        self._latest[place], self._drawn[place] = iterator, None
        self._context.batch_classes |= {type(one) for one in (batch if isinstance(batch, list | tuple) else [batch])}
        # By its mode, too: forwards of a pipeline, and those after a teacher's, do not tell what was drawn for them.
        if self._context.meter is not None and self._context.meter.engine.module.training:
            self._tell_changes([place])
        if self._worst is not None and iterator is self.trained:
            return self._worst
        size = worst.size_of(batch)
        if place not in self._largest or size > self._largest[place][0]:
            self._largest[place] = size, batch
        return batch

    def _reset(self, original: Callable[..., Any], iterator: Any, *args: Any, **kwargs: Any) -> Any:
        for name in ("_autotune_draws", "_autotune_sizes"):  # of an epoch that was left early
            iterator.__dict__.pop(name, None)
        return original(iterator, *args, **kwargs)


def _by_name(frame: FrameType | None) -> str:
    """Returns in words what a call has its batch size from, as a flag of a name that tells nothing; empty for a number."""
    line = frame.f_lineno if frame is not None else 0
    calls = [node for node in ast.walk(syntax_of(frame)) if isinstance(node, ast.Call)]
    calls = [call for call in calls if call.lineno <= line <= (call.end_lineno or 0)]
    values = [word.value for call in calls for word in call.keywords if word.arg == "batch_size"]
    found = {ast.unparse(value) for value in values if not isinstance(value, ast.Constant)}
    return f", which is `{found.pop()}` there" if len(found) == 1 else ""


def _vary(iterator: Any, n_samples: int | None) -> bool:
    """Notes the samples of a draw; returns whether those of an epoch differ, and not only at its end."""
    if n_samples is None:
        return False
    sizes = iterator.__dict__.setdefault("_autotune_sizes", [])  # the first one, and the latest where it differs
    found = len(sizes) > 1 or bool(sizes and n_samples > sizes[0])
    if len(sizes) < 2 and n_samples not in sizes:
        sizes.append(n_samples)
    return found


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
