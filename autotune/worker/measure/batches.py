"""Counts of an engine's batches: samples, tokens and backward calls of each optimizer step."""

import collections
import enum
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autotune.worker.containers import held_by, tensors_in
from autotune.worker.data.padding import Texts
from autotune.worker.data.samples import PREFERRED, of_batch
from autotune.worker.measure.calls import Call, Calls

# Batches of each rank whose checksums are compared between ranks.
N_CHECKSUMS = 2
# Batches whose shapes are noted, and micro-batches whose samples are.
N_SHAPES, N_LATEST = 32, 4096
# Batches that a loader may draw ahead of their use.
MOST_AHEAD = 1024
# Smaller steps that are taken for ends of epochs before the loader says so: it does with its next draw.
MOST_UNSAID_ENDS = 1
# Different steps that the way to count rests on, where the samples of a step vary.
MOST_DIFFERENT_STEPS = 64
# Fields of `StepCount` that are summed over ranks.
TAKEN_IN = ("samples", "tokens", "real_tokens", "elements")

# Samples that a loader drew, None if their number is not known, and the shape of the tensor that counts them.
Draw = tuple[int | None, tuple[int, ...]]


class Ragged(enum.IntEnum):
    """How a step's samples compare with those of others; where ranks differ, the largest value holds."""

    NO = 0
    """An ordinary step."""
    SAME_END = 1
    """A further step of the draw with which an epoch ended."""
    END = 2
    """It had fewer samples, where an epoch ended or may have."""
    UNSAID_END = 3
    """It had fewer samples as if an epoch ended, and its loader did not say so at the one before."""
    VARIES = 4
    """No epoch ended at the last such step: the samples of a step vary."""


class MicroBatch(NamedTuple):
    """Samples of a micro-batch on this rank, counted three ways.

    Attributes:
        first: By the tensor of its first forward call.
        every: By those of all its forward calls.
        drawn: By the loader's draw; None where there was none, or of an unknown number.
        same_kind: The first call's tensor has the shape of the loader's, but for the samples.
    """

    first: int
    every: int
    drawn: int | None
    same_kind: bool = False

    @property
    def by_draw(self) -> int:
        """Returns the samples of the draw that went forward: a script may leave some of them out."""
        return min(self.drawn or 0, self.every) if self.same_kind else self.drawn or 0


@dataclass(frozen=True, kw_only=True)
class StepCount:
    """Counts of what an optimizer step took in on this rank.

    Attributes:
        tokens: Tokens, padding included; 0 where samples are not token sequences.
        real_tokens: Tokens without padding, on the device: reading them would wait for it.
        elements: Elements of all tensors that went forward.
        ragged: Whether it had fewer samples than other steps.
        n_micro: Its micro-batches.
    """

    samples: int = 0
    tokens: int = 0
    real_tokens: Tensor | float = 0
    elements: int = 0
    ragged: Ragged = Ragged.NO
    n_micro: int = 0


class FirstBatches:
    """Shapes and checksums of the first batches."""

    def __init__(self) -> None:
        self.shapes: list[Any] = []
        self.checksums: list[int] = []

    def add(self, tensor: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, checks: bool) -> None:
        """Notes a batch, whose samples a tensor counts."""
        if len(self.shapes) < N_SHAPES:
            self.shapes += of_batch(args, kwargs, tensor.shape[0])[:1]
        if checks and len(self.checksums) < N_CHECKSUMS and tensor.layout is torch.strided:
            self.checksums.append(zlib.crc32(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()))


class Draws:
    """What loaders drew and no micro-batch has used yet, in order.

    Attributes:
        n_samples: Samples of all draws for micro-batches so far.
        largest, last: Samples of the largest draw that was used, and of the last one; 0 without a loader.
        used: A draw was used in the step under way.
        ended: The loader has come to the end of its data.
        missing: A micro-batch had no draw, though no loader had ended.
        sample_dim: Dimension that counts the samples.
    """

    def __init__(self) -> None:
        self._ahead: collections.deque[Draw] = collections.deque(maxlen=MOST_AHEAD)
        # The latest draw that a call without gradients took, and the shape that this call had.
        self._aside: tuple[Draw, tuple[int, ...]] | None = None
        self.n_samples = self.largest = self.last = self.sample_dim = 0
        self.used = self.ended = self.missing = False

    def __bool__(self) -> bool:
        return bool(self._ahead)

    def add(self, draw: Draw) -> None:
        """Adds a draw for a coming call."""
        self._ahead.append(draw)
        self._aside, self.ended = None, False
        self.n_samples += draw[0] or 0

    def set_aside(self, shape: tuple[int, ...]) -> list[Draw]:
        """Takes the latest draw for a call that does not train; returns it, if there is one."""
        if not self._ahead:
            return []
        draw = self._ahead.pop()
        self._aside = draw, shape
        self.n_samples -= draw[0] or 0
        return [draw]

    def put_back(self, draws: Sequence[Draw]) -> None:
        """Gives draws back that were set aside: their call trained."""
        self._ahead.extendleft(draws)
        self.n_samples += sum(n or 0 for n, _ in draws)

    def use(self, shape: tuple[int, ...]) -> tuple[int | None, bool]:
        """Takes the draw of a micro-batch whose tensor has a shape; returns its samples, and `same_kind`.

        A batch of which a reference's output came first still has its draw.
        """
        aside, self._aside = self._aside, None
        if aside is not None and not self._ahead and shape == aside[1]:
            self.put_back([aside[0]])
        if not self._ahead:
            # After its end, a script that has kept the loader's batches goes through them again.
            self.missing = self.missing or not self.ended
            return self.largest if self.ended and self.largest else None, False
        n, drawn_shape = self._ahead.popleft()
        self.used, self.last = True, n or 0
        self.largest = max(self.largest, self.last)
        if n not in drawn_shape:
            return n, False
        self.sample_dim = dim = drawn_shape.index(n)
        return n, drawn_shape[:dim] + drawn_shape[dim + 1 :] == shape[:dim] + shape[dim + 1 :]

    def clear(self) -> None:
        """Drops all draws that were not used."""
        self._ahead.clear()


class BatchObserver:
    """Counts samples at the engine's forward and backward calls per optimizer step.

    The loader's count holds only where each micro-batch is exactly one draw. Otherwise the tensors that went forward are
    counted: by their leading dimension, or by the one that counts the samples of the loader's batches.

    Args:
        forgiving: Leave out steps with fewer samples than earlier ones, which end an epoch.
        uneven: The samples of a step are known to vary, as where a token budget fills batches: all steps count.
        shards: Ranks over which each sequence is split; this one sees its share of the tokens.

    Attributes:
        last: The latest optimizer step.
        uneven: The argument; a probe sets it when it finds that they vary.
        n_updates: The engine's count of optimizer steps; what sets that, as from a checkpoint, sets this.
        n_backward: Backward calls of the step under way; several of one forward call, as one for each loss, are one micro-batch.
        trains_in_evaluation_mode: A forward call went backward in that mode, as with batch norms that are frozen.
    """

    def __init__(self, engine: Any, *, forgiving: bool = False, uneven: bool = False, shards: int = 1) -> None:
        self.shards, self.uneven = shards, uneven
        self.backward_counts: set[int] = set()
        self.noted, self.last = FirstBatches(), StepCount()
        self._engine, self._forgiving = engine, forgiving
        self.n_updates = engine.global_steps
        self._draws = Draws()
        self._latest_draw = 0
        self._epoch_ended = self._pending = False
        # Of the step under way, then of all steps; steps that are alike are kept once.
        self._micro: list[MicroBatch] = []
        self._fresh = True
        self._elements = self.n_backward = self._n_forward = 0
        self._seen: dict[tuple[MicroBatch, ...], None] = {}
        self._n_first = self._n_every = 0
        self._every_fits = True  # all forward calls made up the draws at the end of each step
        # The latest micro-batches, and whether the draws of one epoch vary.
        self._latest: collections.deque[MicroBatch] = collections.deque(maxlen=N_LATEST)
        self._draws_vary, self._ends_said = False, 0
        # A forward call with gradients in evaluation mode, and its draw: training where it goes backward.
        self._unsure: tuple[tuple[Any, ...], dict[str, Any], list[Draw]] | None = None
        self.trains_in_evaluation_mode = False
        self.texts = Texts(engine.module, shards)
        engine.register_forward_pre_hook(self._on_forward, with_kwargs=True)
        self._calls = Calls(engine)

    @property
    def draw_size(self) -> int:
        """Returns the samples of the largest draw that was used; 0 without a loader."""
        return self._draws.largest

    @property
    def went_forward(self) -> bool:
        """Returns whether a micro-batch went forward but not yet backward."""
        return not self._fresh

    @property
    def may_go_backward(self) -> bool:
        """Returns whether a backward call may be that of a micro-batch: also of one in evaluation mode, which may be none."""
        return self.went_forward or self._unsure is not None

    @property
    def trains(self) -> bool:
        """Returns whether a forward call now is part of the training; in evaluation mode, once one went backward there."""
        return torch.is_grad_enabled() and (self._engine.module.training or self.trains_in_evaluation_mode)

    @property
    def in_training_mode(self) -> bool:
        """Returns whether the model is in training mode, which the engine's `train` and `eval` set."""
        return bool(self._engine.module.training)

    # What the hooks tell

    def _on_forward(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.trains:
            self._unsure = None
            self._forward(args, kwargs)  # a loss may call the model more than once for one micro-batch
            return
        draws = self._draws.set_aside(_shape(counted_tensor(args, kwargs)))  # the last draw was for evaluation
        self._unsure = (args, kwargs, draws) if torch.is_grad_enabled() and self._fresh else None

    def micro_batch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Notes the only forward call of a micro-batch, which others may follow before it goes backward."""
        self._fresh = True
        self._forward(args, kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tensor = counted_tensor(args, kwargs)
        shape = _shape(tensor)
        if self._fresh:
            self._settle()
        drawn, same_kind = self._draws.use(shape) if self._fresh else (None, False)
        rows = shape[self._draws.sample_dim if len(shape) > self._draws.sample_dim else 0] if shape else 0
        self._elements += sum(one.numel() for one in tensors_in((args, dict(kwargs)), objects=True))
        text = tensor if tensor is not None and are_tokens(tensor) else None
        tokens = (0, 0) if text is None else self.texts.note(text, args, kwargs, first=self._fresh)
        self._calls.add(Call(shape, rows, tokens))
        if self._fresh:
            self._micro.append(MicroBatch(rows, rows, drawn, same_kind))
            self._n_first += rows
            if shape:
                self.noted.add(tensor, args, kwargs, checks=self._forgiving)
        else:
            self._micro[-1] = self._micro[-1]._replace(every=self._micro[-1].every + rows)
        self._n_every += rows
        self._n_forward += 1
        self._fresh = False

    def _settle(self) -> None:
        """Ends a micro-batch: batches before it that were drawn and went forward, but that the script skipped, are none of it."""
        followed, rows = self._calls.settle()
        for first in followed:
            self._micro[-1] = self._micro[-1]._replace(first=first.rows, every=rows)
            if self._draws:  # else the loss left out a first output of the one draw
                self._micro[-1] = MicroBatch(first.rows, rows, *self._draws.use(first.shape))
                self._n_first += first.rows

    def drew(self, n_samples: int | None, batch: Any = None, *, varies: bool = False) -> None:
        """Notes the samples that a loader drew for a coming micro-batch.

        Args:
            n_samples: Samples in the draw; None if their number is not known.
            varies: Whether the loader's draws differ within an epoch, and not only at its end.
        """
        self._draws_vary = self._draws_vary or varies
        self._draws.add((n_samples, _shape(counted_tensor((batch,), {}))))
        self._latest_draw = n_samples or 0

    def ended(self) -> None:
        """Notes that a loader has come to the end of its data."""
        self._draws.ended = self._epoch_ended = True
        self._ends_said = min(self._ends_said + 1, MOST_UNSAID_ENDS)

    def forget_draws(self) -> None:
        """Drops the draws so far, which belong to no coming micro-batch."""
        self._draws.clear()

    def backward(self) -> None:
        """Notes a backward call."""
        if self._unsure is not None:
            (args, kwargs, draws), self._unsure, self.trains_in_evaluation_mode = self._unsure, None, True
            self._draws.put_back(draws)
            self._forward(args, kwargs)
        self.n_backward += 1
        self._fresh = True

    def step(self) -> bool:
        """Notes a call of `engine.step`; returns whether it was an optimizer step."""
        if self._engine.global_steps == self.n_updates:
            return False
        self._settle()
        self.n_updates = self._engine.global_steps
        micro = tuple(self._micro)
        self._every_fits &= self._n_every in (self._draws.n_samples - self._latest_draw, self._draws.n_samples)
        way = self._way(micro)
        samples = sum(getattr(one, way) for one in micro)
        ragged = Ragged.NO if self.uneven else self._ragged(samples, {getattr(one, way) for one in micro})
        self._latest.extend(micro)
        i = int(way == "every")
        self.last = StepCount(
            samples=samples, tokens=self._calls.tokens[i] * self.shards, real_tokens=self._calls.real_tokens[i] * self.shards,
            elements=self._elements * self.shards, ragged=ragged, n_micro=min(self.n_backward, self._n_forward or self.n_backward),
        )  # fmt: skip
        if not ragged:
            if len(self._seen) < MOST_DIFFERENT_STEPS:
                self._seen[micro] = None
            self.backward_counts.add(self.last.n_micro)
        self._micro, self._epoch_ended, self._draws.used = [], False, False
        self._calls.restart()
        self._elements = self.n_backward = self._n_forward = 0
        return True

    # What it adds up to

    @property
    def parts(self) -> int:
        """Returns the micro-batches that the script makes of one draw; 0 unless it cuts the loader's batches up."""
        rows = max(self._column("first"), default=0)
        cut = self._draws.missing and not self.uneven and 0 < rows < self.draw_size
        return -(-self.draw_size // rows) if cut else 0

    def rows(self) -> set[tuple[int, int | None]]:
        """Returns the rows and the drawn samples of the micro-batches so far."""
        return {(one.first, one.drawn) for micro in self._seen for one in micro}

    @property
    def flattened(self) -> bool:
        """Returns whether each micro-batch of several samples is one row: samples one after the other, without padding."""
        rows = {first for first, drawn in self.rows() if drawn is not None and drawn > 1}
        return rows == {1}

    @property
    def micro_batch_sizes(self) -> set[int]:
        """Returns the sizes of micro-batches; where draws are cut up, without the part that is left over."""
        sizes = self._column("first")
        return {max(sizes)} if self.parts else sizes

    @property
    def loader_batch_sizes(self) -> set[int]:
        """Returns the samples drawn for a micro-batch; empty where draws and micro-batches do not match."""
        return self._column("by_draw") if self._way() == "by_draw" else set()

    @property
    def samples_per_step(self) -> set[int]:
        """Returns the samples of an optimizer step; where draws are cut up, without the parts that are left over."""
        found = {sum(getattr(one, self._way(micro)) for one in micro) for micro in self._seen}
        return {max(found)} if self.parts and found else found

    def sizes(self) -> list[int]:
        """Returns the samples of the latest micro-batches, ends of epochs included."""
        way = self._way()
        return [getattr(one, way) for one in self._latest]

    def _column(self, name: str) -> set[int]:
        return {getattr(one, name) for micro in self._seen for one in micro} - {0, None}

    def _way(self, micro: tuple[MicroBatch, ...] = ()) -> str:
        """Returns which of the counts of a micro-batch holds, by what all steps so far and `micro` show."""
        every = [one for step in (*self._seen, micro) for one in step]
        drawn, first = {one.drawn for one in every}, {one.first for one in every}
        behind = self._draws.n_samples - self._latest_draw
        if self._draws.missing or None in drawn:
            # The calls of all but a first one are micro-batches' too if only so the draws add up.
            return "every" if self._n_first <= behind < self._n_every <= self._draws.n_samples else "first"
        if self._draws and self._n_first < self._n_every:
            return "every" if self._every_fits else "by_draw"
        if self._draws and self._n_first in (behind, self._draws.n_samples):
            return "first"  # several draws make a micro-batch
        # If draws differ and tensors do not, something else drew in between, unless the loader's own draws differ.
        return "first" if len(drawn) > 1 and len(first) == 1 and not self._draws_vary else "by_draw"

    def _ragged(self, samples: int, sizes: set[int]) -> Ragged:
        """Returns how a step's samples, and the sizes of its micro-batches, compare with those of others."""
        has_loader, was_pending = self.draw_size > 0, self._pending
        at_end = self._epoch_ended or 0 < self._draws.last < self.draw_size
        # Of a draw that is cut up something may be left over each time, which ends no epoch.
        smaller = self._forgiving and (at_end or not self.parts) and samples < max(self.samples_per_step, default=0)
        # Loaders in turns, each of another size, make steps of unlike micro-batches, or larger ones than the first.
        explained = smaller or self._epoch_ended or (has_loader and self._draws.missing)
        differ = max(len(sizes), len({samples} | self.samples_per_step)) > 1
        if self._forgiving and differ and (self._draws_vary or not explained):
            return Ragged.VARIES
        self._pending = smaller and not at_end
        # A loader says at the latest with its next draw that it had ended; in a loop without one, an end stands alone.
        varies = was_pending and (not self._epoch_ended if has_loader else smaller)
        if varies or not smaller:
            return Ragged.VARIES if varies else Ragged.NO
        if not self._draws.used and self.last.ragged:
            return Ragged.SAME_END
        self._ends_said -= self._draws.used and has_loader
        return Ragged.UNSAID_END if self._ends_said < -MOST_UNSAID_ENDS else Ragged.END


def _shape(tensor: Tensor | None) -> tuple[int, ...]:
    return tuple(tensor.shape) if tensor is not None else ()


def are_tokens(tensor: Tensor) -> bool:
    """Returns whether the tensor that counts samples holds sequences of tokens: two dimensions of whole numbers."""
    return tensor.dim() == 2 and tensor.dtype in (torch.int64, torch.int32)


def counted_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Returns the tensor of a forward call whose leading dimension counts the samples; None without one."""
    for name in PREFERRED:
        if isinstance(kwargs.get(name), Tensor):
            return kwargs[name]  # type: ignore[no-any-return]
    pending: list[Any] = [*args, *kwargs.values()]
    while pending:
        value = pending.pop(0)
        if isinstance(value, Tensor):
            return value
        if not isinstance(value, list | tuple | Mapping):
            value = held_by(value)
        if isinstance(value, Mapping):
            value = [*(value[name] for name in PREFERRED if name in value), *value.values()]
        if value:
            pending = [*value, *pending]
    return None
