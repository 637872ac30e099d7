"""Counts of an engine's batches: samples, tokens and backward calls of each optimizer step."""

from __future__ import annotations

import collections
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autotune.worker.model.samples import of_batch

# Names, as Hugging Face models use them, of tensors whose leading dimension counts the samples.
PREFERRED = ("input_ids", "pixel_values", "input_values", "input_features", "inputs_embeds", "inputs", "x")
# Batches of each rank whose checksums are compared between ranks.
N_CHECKSUMS = 2
# Batches whose shapes are noted.
N_SHAPES = 32
# Batches that a loader may draw ahead of their use.
MOST_AHEAD = 1024


class BatchObserver:
    """Counts samples at the engine's forward and backward calls per optimizer step.

    Args:
        engine: The DeepSpeed engine.
        forgiving: Leave out steps with fewer samples than earlier ones, which end an epoch.
    """

    def __init__(self, engine: Any, *, forgiving: bool = False) -> None:
        self.micro_batch_sizes: set[int] = set()
        self.loader_batch_sizes: set[int] = set()
        self.backward_counts: set[int] = set()
        self.samples_per_step: set[int] = set()
        self.tokens_per_step: set[int] = set()
        self.ragged = False
        self.checksums: list[int] = []
        self.shapes: list[Any] = []
        self._engine, self._forgiving = engine, forgiving
        self._micro = self._tokens = 0
        self._sizes: list[int] = []
        self._draws: list[int | None] = []
        self._drawn: collections.deque[int | None] = collections.deque(maxlen=MOST_AHEAD)
        self._fresh = True
        self._steps = engine.global_steps
        engine.register_forward_pre_hook(self._on_forward, with_kwargs=True)

    @property
    def went_forward(self) -> bool:
        """Returns whether a micro-batch went forward but not yet backward."""
        return not self._fresh

    def _on_forward(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or not self._engine.training:
            if self._drawn:
                self._drawn.pop()  # the last draw was for evaluation
            return
        if not self._fresh:
            return  # a loss may call the model more than once for one micro-batch
        self.micro_batch(args, kwargs)

    def micro_batch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Notes a forward call."""
        self._fresh = False
        # A framework may draw the micro-batches of a whole step, or one of the next step, ahead.
        self._draws.append(self._drawn.popleft() if self._drawn else None)
        tensor = counted_tensor(args, kwargs)
        if tensor is None or tensor.dim() == 0:
            return
        self._sizes.append(tensor.shape[0])
        if tensor.dim() == 2 and not tensor.is_floating_point() and tensor.dtype is not torch.bool:
            self._tokens += tensor.numel()
        if self._forgiving and len(self.shapes) < N_SHAPES:
            self.shapes += of_batch(args, kwargs, tensor.shape[0])[:1]
        if self._forgiving and len(self.checksums) < N_CHECKSUMS:
            self.checksums.append(zlib.crc32(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()))

    def drew(self, n_samples: int | None) -> None:
        """Notes the samples that the loader drew for a coming micro-batch."""
        self._drawn.append(n_samples)

    def forget_draws(self) -> None:
        """Drops the draws so far, which belong to no coming micro-batch."""
        self._drawn.clear()

    def backward(self) -> None:
        """Notes a backward call."""
        self._micro += 1
        self._fresh = True

    def step(self) -> bool:
        """Notes a call of `engine.step`; returns whether it was an optimizer step."""
        if self._engine.global_steps == self._steps:
            return False
        self._steps = self._engine.global_steps
        # A loader's count holds only if each micro-batch was one draw; else the script splits or joins batches.
        draws = [n for n in self._draws if n is not None]
        drawn = draws if len(draws) == len(self._draws) else []
        if len(set(drawn)) > 1 and len(set(self._sizes)) == 1:
            drawn = []  # something else drew in between
        samples = sum(drawn or self._sizes)
        self.ragged = self._forgiving and samples < max(self.samples_per_step, default=0)
        if not self.ragged:
            self.micro_batch_sizes.update(self._sizes)
            self.loader_batch_sizes.update(drawn)
            self.backward_counts.add(self._micro)
            self.samples_per_step.add(samples)
            self.tokens_per_step.add(self._tokens)
        self._micro = self._tokens = 0
        self._sizes, self._draws = [], []
        self._drawn.clear()
        return True


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
        if isinstance(value, Mapping):
            pending = [*(value[name] for name in PREFERRED if name in value), *value.values(), *pending]
        elif isinstance(value, (list, tuple)):
            pending = [*value, *pending]
    return None
