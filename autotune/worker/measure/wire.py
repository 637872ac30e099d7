"""Collectives of the step that is taken apart, and counts of the calls of DeepSpeed's functions."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from autotune.worker.containers import tensors_in
from autotune.worker.script.patching import patch


class Wire:
    """Collectives of one step of this rank, counted by phase and type of what was sent."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, torch.dtype]] = Counter()

    def clear(self) -> None:
        """Forgets what was sent."""
        self.calls.clear()

    def note(self, phase: str, arguments: Any) -> None:
        """Notes a collective by the largest tensor of its arguments; one without tensors, as a barrier, sends nothing."""
        tensors = list(tensors_in(arguments))
        if tensors:
            largest = max(tensors, key=lambda tensor: tensor.numel() * tensor.element_size())
            self.calls[phase, largest.dtype] += 1

    def types(self, *phases: str) -> set[torch.dtype]:
        """Returns the types that were sent in some phases."""
        return {dtype for phase, dtype in self.calls if phase in phases}


# Of this rank; a process trains one engine.
wire = Wire()


class CallCount:
    """Number of calls of a function of DeepSpeed, once `watch` was called. Of this rank; a process trains one engine."""

    def __init__(self) -> None:
        self.calls = 0

    def watch(self, owner: Any, name: str) -> None:
        """Wraps the function in its module or class; call it before the model runs."""
        patch(owner, name, self._count)

    def _count(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return original(*args, **kwargs)
