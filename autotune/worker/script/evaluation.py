"""Evaluations of a script: no part of its steps, other than calls without gradients that its training needs."""

import time
from collections.abc import Mapping
from typing import Any

import torch

from autotune.worker.measure.batches import BatchObserver, counted_tensor
from autotune.worker.measure.ledger import Window
from autotune.worker.script.context import ScriptContext

# An evaluation that takes longer is worth leaving out.
LONG_S = 5.0
# Samples of the first calls without gradients that are looked for in the first batches that are trained on: of those in training
# mode more, since a buffer of what was played gives back any of them.
N_ROWS, N_PLAYED = 64, 512
# How often it is looked whether what was called without gradients is then trained on: each look copies from the device.
MOST_LOOKS = 4
# Bytes that say enough to know a sample by its beginning, as a prompt in what was generated from it: four tokens.
LEAST_PREFIX = 32

# Bytes of a sample, and their hash: the samples themselves would count as memory of the trial on a CPU.
Row = tuple[int, int]


class Evaluations:
    """Tells a window of steps which of its time went into evaluations.

    What reinforcement learning plays or generates without gradients is trained on next, as is a batch of which a
    reference's or the model's own first output is taken, perhaps of some batches alone: then no such call is an
    evaluation. Nor is one in training mode, some of whose samples come back from a buffer of what was played. Whether
    those of the steps are, as only some steps have them, the ledger finds.
    """

    def __init__(self, context: ScriptContext) -> None:
        self._context = context
        self._began: float | None = None  # the evaluation under way
        self._rows: set[Row] = set()  # of all calls before the training, then of the latest one
        self._played: set[Row] = set()  # of calls in training mode
        self._trained = self._rollouts = False
        self._n_looks = 0

    def forward(
        self, window: Window | None, batches: BatchObserver, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Notes a forward call of the engine, in a window of steps."""
        if batches.went_forward:  # the call belongs to a micro-batch that is to go backward
            return
        if not batches.trains:
            self._calls_without_gradients(window, batches, args, kwargs)
            return
        began, first = self._began, not self._trained
        self._began, self._trained = None, True
        if began is None:
            return
        took_s = time.monotonic() - began
        if self._looks:
            self._n_looks += 1
            played = _holds_a_row(self._rows if first else self._played, args, kwargs)
            self._rollouts = played or (not first and self._holds_no_other_row(args, kwargs))
            if self._rollouts and window is not None:
                window.plays()
        self._rows = set()
        if window is None:
            return
        if first:
            self._context.recorder.enter("warmup")
            if not (self._rollouts or batches.trains_in_evaluation_mode):  # there the first micro-batch passed for one
                window.restart()
                window.cut(aside=True)  # the step counts as one of those that have an evaluation
                self._tell(took_s)
        elif not self._rollouts:
            window.cut(aside=True)

    def _calls_without_gradients(
        self, window: Window | None, batches: BatchObserver, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        begins = self._began is None
        self._began = self._began or time.monotonic()
        if self._looks:
            most = N_PLAYED if batches.in_training_mode else N_ROWS
            room = max(0, most - len(self._rows) * (not self._trained))
            rows = {_row(each) for each in _rows_of(args, kwargs, room)}
            self._rows = rows if self._trained else self._rows | rows
            if batches.in_training_mode and len(self._played) < N_PLAYED:
                self._played |= rows
        if not self._trained:
            if begins:
                self._context.recorder.enter("first_evaluation")
        elif begins and window is not None and batches.n_backward:  # else it began where the last step ended
            window.cut(aside=False)

    @property
    def _looks(self) -> bool:
        return not self._rollouts and self._n_looks < MOST_LOOKS

    def _tell(self, took_s: float) -> None:
        if took_s > LONG_S and self._context.candidate is None:
            self._context.once(
                f"the script evaluates for {took_s:.0f} s before it trains, and so does each trial: leave that out while"
                " it is tuned"
            )

    def _holds_no_other_row(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Returns whether a batch is that of the latest call, or a part of it: an evaluation may share a few samples with it."""
        rows = _rows_of(args, kwargs, N_ROWS)
        return bool(rows) and self._rows.issuperset(map(_row, rows))


def _holds_a_row(known: set[Row], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a batch holds one of the samples, or one that begins with it."""
    lengths = {n for n, _ in known}
    return bool(known) and any(
        _row(row[:n]) in known
        for row in _rows_of(args, kwargs)
        for n in lengths
        if n == len(row) or LEAST_PREFIX <= n < len(row)
    )


def _row(row: bytes) -> Row:
    return len(row), hash(row)


def _rows_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], n: int | None = None) -> list[bytes]:
    """Returns the first n samples of a batch, or all of them."""
    tensor = counted_tensor(args, kwargs)
    plain = tensor is not None and tensor.dim() and tensor.layout is torch.strided
    first = tensor.detach()[:n].cpu() if tensor is not None and plain else torch.empty(0)
    if not first.numel():
        return []
    return [row.tobytes() for row in first.reshape(len(first), -1).contiguous().view(torch.uint8).numpy()]
