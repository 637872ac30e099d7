"""The tail check of a script: its loader yields the worst batch, and the script's own loop trains on it."""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from autotune.worker.data import worst
from autotune.worker.measure.batches import counted_tensor
from autotune.worker.measure.tail import Tail
from autotune.worker.script.context import ScriptContext

# Optimizer steps in which the worst batch must come to the engine; a loader draws ahead.
MOST_STEPS = 3


class ScriptTail:
    """Feeds the worst batch into a script, and waits until it has gone backward.

    Args:
        batch: The worst batch; None where it could not be made.
    """

    def __init__(self, context: ScriptContext, tail: Tail, batch: Any) -> None:
        self._context, self._tail, self._batch = context, tail, batch
        tensor = counted_tensor((batch,), {})
        self._shape = tuple(tensor.shape[1:]) if tensor is not None else None
        self._n_seen = self._n_steps = 0
        self._inputs: tuple[tuple[Any, ...], Mapping[str, Any]] = ((), {})
        self._rows = 0
        if batch is not None:
            tail.note(batch, self._samples())

    @classmethod
    def of(cls, context: ScriptContext) -> "ScriptTail | None":
        """Begins the check that a trial's request asks for; None without one."""
        tail = Tail.of(context.meter) if context.meter is not None else None
        return cls(context, tail, context.loaders.feed_worst(tail.check)) if tail is not None else None

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Notes a forward call of the engine."""
        tensor = counted_tensor(args, kwargs)
        is_worst = self._shape is not None and tensor is not None and tuple(tensor.shape[1:]) == self._shape
        self._n_seen += is_worst
        if is_worst or not self._n_seen:
            self._inputs, self._rows = (args, kwargs), int(tensor.shape[0]) if tensor is not None else 0

    def reached(self) -> bool:
        """Returns whether all ranks have trained on the worst batch, with the gradients of an earlier one where there are.

        A batch of the same shape may come to one rank by chance, as rows that are packed full do.
        """
        return self._least_seen() >= self._tail.n_micro

    def _least_seen(self) -> int:
        """Returns the worst batches that each rank has seen at least; all ranks take part."""
        seen = torch.tensor(self._n_seen, device=self._tail.engine.device)
        dist.all_reduce(seen, op=dist.ReduceOp.MIN)
        return int(seen)

    def step(self) -> bool:
        """Notes an optimizer step; returns whether the check is over, on all ranks."""
        self._n_steps += 1
        if hasattr(self._tail.engine, "train_batch"):  # a pipeline, whose micro-batches are not seen one by one
            self._n_seen = self._tail.n_micro
        return self.reached() or self._n_steps >= MOST_STEPS

    def _samples(self) -> int:
        """Returns the samples of the worst batch: as many as were drawn where they are one row."""
        assert self._context.meter is not None
        batches = self._context.meter.batches
        flat = batches.flattened and not batches.uneven
        return batches.draw_size if flat else self._rows or worst.rows_of(self._batch)

    def finish(self) -> None:
        """Ends the check; all ranks take part."""
        if self._least_seen():
            self._tail.note(self._batch, self._samples())
        elif len(self._context.request.lengths) > 1 or self._tail.check.length:
            self._context.report.tail = {}
            self._context.once(
                "the longest batch did not reach the engine as its loader yielded it, so whether it fits was not tried"
            )
        else:  # the script makes its batches by hand, all alike
            self._tail.note(self._inputs, self._samples())
        self._tail.finish(self._evaluate)

    def _evaluate(self) -> None:
        """Runs a forward; that of a pipeline on a batch of its loader, which the first and the last stage take in."""
        engine, (args, kwargs) = self._tail.engine, self._inputs
        if not hasattr(engine, "train_batch"):
            if args or kwargs:
                engine(*args, **kwargs)
            return
        takes_in = engine.data_iterator is not None
        batch = next(engine.data_iterator, None) if takes_in else None
        has_batch = torch.tensor(int(not takes_in or batch is not None), device=engine.device)
        dist.all_reduce(has_batch, op=dist.ReduceOp.MIN)
        if has_batch:
            type(engine).eval_batch(engine, itertools.repeat(batch) if takes_in else None)
        else:
            self._context.once("the script's data ended before an evaluation step, so whether it fits was not tried")
