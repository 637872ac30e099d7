"""What ranks sent to each other in the step that is taken apart: collectives by phase and type."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from autotune.worker.containers import tensors_in


class Wire:
    """Collectives of one step of this rank.

    Attributes:
        calls: Number of them, by phase of the step and type of what was sent.
    """

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
