"""Activation checkpointing: apply it to blocks, and note which blocks are recomputed.

What torch's compiler takes into a graph is left as it is: asking there whether a backward pass runs would cut the graph into
pieces at each block, and with recomputation nothing would be compiled at all. The compiler itself tells of recomputation then.
"""

import functools
import math
import types
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Self

import torch
from torch import nn

from autotune.worker.script.patching import after_import, patch

# Runs and times a recomputation while a step is taken apart, of this process's one engine.
timer: Callable[[Callable[[], Any]], Any] | None = None
# Called for each checkpoint that the compiler traces.
_on_traced: list[Callable[[], None]] = []
TRACER = "torch._dynamo.variables.higher_order_ops"


def _watch_compiler(module: ModuleType) -> None:
    kind = getattr(module, "CheckpointHigherOrderVariable", None)
    name = next((name for name in ("_call_function", "call_function") if name in vars(kind or object)), "")

    def traced(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for note in _on_traced:
            note()
        return original(*args, **kwargs)

    patch(kind, name, traced)


def _when_traced(note: Callable[[], None]) -> None:
    if not _on_traced:
        after_import(TRACER, _watch_compiler)
    _on_traced.append(note)


def _in_backward() -> bool:
    """Returns whether a backward pass is running, in which what goes forward is recomputed."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class Checkpointer:
    """Recomputes every k-th block by overriding `forward` of the instance, and notes which blocks it recomputed.

    Names, classes and state_dict do not change, and a deep copy of a block (an average of weights) computes with its own weights.
    """

    def __init__(self, blocks: list[nn.Module], every: int) -> None:
        self.recomputed: set[int] = set()
        self.wrapped = blocks[::every]
        _when_traced(lambda: _add_another(self.recomputed, len(self.wrapped)))
        for block in self.wrapped:
            block.forward = types.MethodType(self._recomputing(block), block)

    def _recomputing(self, block: nn.Module) -> Callable[..., Any]:
        from torch.utils.checkpoint import checkpoint as named

        own = getattr(named, "original", named)  # a script's own calls may be turned off
        key, given = id(block), block.__dict__.get("forward")  # what somebody else has put in place of the class's

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return given(*args, **kwargs) if given is not None else type(module).forward(module, *args, **kwargs)

        def observed(*args: Any, **kwargs: Any) -> Any:
            if _in_backward():  # this is the recomputation
                self.recomputed.add(key)
                return _timed(functools.partial(forward, *args, **kwargs))
            return forward(*args, **kwargs)

        def recomputing(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(module, *args, **kwargs)
            checkpoint = named if torch.compiler.is_compiling() else own  # the compiler knows it by its name
            return checkpoint(observed, module, *args, use_reentrant=False, **kwargs)

        return recomputing


def _timed(run: Callable[[], Any]) -> Any:
    return timer(run) if timer is not None else run()


def _add_another(recomputed: set[int], most: int) -> None:
    """Adds one more block of those that are recomputed where it is not known which one it is."""
    if len(recomputed) < most:
        recomputed.add(-1 - len(recomputed))


def called(parent: nn.Module) -> Iterator[nn.Module]:
    """Yields the children of a module that are called; of those without a forward, as a ModuleDict of layers, what they hold."""
    for child in parent.children():
        if getattr(child.forward, "__func__", None) is nn.Module.forward:
            yield from called(child)
        else:
            yield child


class Recomputations:
    """Notes which blocks are recomputed in a backward pass.

    Args:
        blocks: The repeated blocks of the model.
        every: The value of `Candidate.checkpoint_every` for a pipeline, whose engine calls whole blocks again; None if it
            follows from the recomputed blocks, which may checkpoint their own forward.

    Attributes:
        around: Runs what a script recomputes, given it by its call: in forward, or `again` in backward.
    """

    def __init__(self, blocks: list[nn.Module], every: int | None = None) -> None:
        self.recomputed: set[int] = set()
        self._n_blocks, self._every = len(blocks), every
        self._n_seen = 0
        self.around: Callable[..., Any] = lambda _call, run, again: run()
        _when_traced(self._another)
        # If a block's own forward is checkpointed, its hook runs once only; those of its children run again.
        self._handles = [
            module.register_forward_pre_hook(functools.partial(self._on_forward, id(block)))
            for block in blocks
            for module in (called(block) if every is None else [block])
        ]

    def __deepcopy__(self, _memo: object) -> Self:
        """A deep copy of the model, as for an average of its weights, must not copy what its hooks hold."""
        return self

    def _on_forward(self, block: int, _module: nn.Module, _args: Any) -> None:
        if _in_backward():
            self.recomputed.add(block)
            self._n_seen += 1

    def _another(self) -> None:
        if self._handles and self._every is None:
            _add_another(self.recomputed, self._n_blocks)

    def noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what a script recomputes, which also tells of a block that was compiled by itself, where no hook runs."""
        if torch.compiler.is_compiling() or not (self._handles or timer):
            return function

        def noted(*args: Any, **kwargs: Any) -> Any:
            again, n_seen = _in_backward(), self._n_seen
            run = functools.partial(self.around, noted, functools.partial(function, *args, **kwargs), again=again)
            try:
                return _timed(run) if again else run()
            finally:  # it raises where the rest is not needed
                if again and self._n_seen == n_seen:
                    self._another()

        return noted

    @property
    def every(self) -> int:
        """The value of `Candidate.checkpoint_every`, by which about as many blocks are recomputed."""
        n_blocks, n_recomputed = self._n_blocks, len(self.recomputed)
        if self._every is not None or not n_recomputed:
            return self._every or 0
        return min(range(1, n_blocks + 1), key=lambda every: abs(math.ceil(n_blocks / every) - n_recomputed))

    def stop(self) -> None:
        """Removes the hooks, so that they do not slow timed steps; what is recomputed is still timed while a step is taken apart."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
