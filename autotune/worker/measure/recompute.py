"""Activation checkpointing: apply it to blocks, and note which blocks are recomputed."""

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import nn


class Checkpointer:
    """Recomputes every k-th block by overriding `forward` of the instance, and notes which blocks it recomputed.

    Names, classes and state_dict do not change, and a deep copy of a block (an average of weights) computes with its own weights.
    """

    def __init__(self, blocks: list[nn.Module], every: int) -> None:
        self.recomputed: set[int] = set()
        # Runs and times a recomputation, if set.
        self.timer: Callable[[Callable[[], Any]], Any] | None = None
        self.wrapped = blocks[::every]
        for block in self.wrapped:
            block.forward = types.MethodType(self._recomputing(block), block)

    def _recomputing(self, block: nn.Module) -> Callable[..., Any]:
        from torch.utils.checkpoint import checkpoint

        checkpoint = getattr(checkpoint, "original", checkpoint)  # a script's own calls may be turned off
        key, given = id(block), block.__dict__.get("forward")  # what somebody else has put in place of the class's

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return given(*args, **kwargs) if given is not None else type(module).forward(module, *args, **kwargs)

        def observed(*args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() != -1:  # inside a backward pass: this is the recomputation
                self.recomputed.add(key)
                if self.timer is not None:
                    return self.timer(lambda: forward(*args, **kwargs))
            return forward(*args, **kwargs)

        def recomputing(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(module, *args, **kwargs)
            return checkpoint(observed, module, *args, use_reentrant=False, **kwargs)

        return recomputing


def _called(block: nn.Module) -> Iterator[nn.Module]:
    """Yields the children of a block whose forward it calls; of containers, which have none (as in T5), what they hold."""
    for child in block.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called(child)
        else:
            yield child


class Recomputations:
    """Notes which blocks are recomputed in a backward pass.

    Args:
        blocks: The repeated blocks of the model.
        every: The value of `Candidate.checkpoint_every` for a pipeline, whose engine calls whole blocks again; None if it
            follows from the recomputed blocks, which may checkpoint their own forward.
    """

    def __init__(self, blocks: list[nn.Module], every: int | None = None) -> None:
        self.recomputed: set[int] = set()
        self._n_blocks, self._every = len(blocks), every
        # If a block's own forward is checkpointed, its hook runs once only; those of its children run again.
        self._handles = [
            module.register_forward_pre_hook(functools.partial(self._on_forward, id(block)))
            for block in blocks
            for module in (_called(block) if every is None else [block])
        ]

    def __deepcopy__(self, _memo: object) -> Self:
        """A deep copy of the model, as for an average of its weights, must not copy what its hooks hold."""
        return self

    def _on_forward(self, block: int, _module: nn.Module, _args: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            self.recomputed.add(block)

    @property
    def every(self) -> int:
        """The value of `Candidate.checkpoint_every`."""
        if self._every is not None:
            return self._every
        return round(self._n_blocks / len(self.recomputed)) if self.recomputed else 0

    def stop(self) -> None:
        """Removes the hooks, so that they do not slow timed steps."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
