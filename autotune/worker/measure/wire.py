"""What ranks sent to each other in the step that is taken apart: collectives and bytes, by phase and type."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from autotune.worker.containers import tensors_in


class Wire:
    """Collectives of one step of this rank.

    Attributes:
        calls: Number of them, by phase of the step and type of what was sent.
        sent_bytes: Bytes of the largest tensor of each, likewise.
    """

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, torch.dtype]] = Counter()
        self.sent_bytes: Counter[tuple[str, torch.dtype]] = Counter()

    def clear(self) -> None:
        """Forgets what was sent."""
        self.calls.clear()
        self.sent_bytes.clear()

    def note(self, phase: str, arguments: Any) -> None:
        """Notes a collective by its arguments; those without tensors, as barriers, send nothing."""
        tensors = list(tensors_in(arguments))
        if tensors:
            largest = max(tensors, key=lambda tensor: tensor.numel() * tensor.element_size())
            self.calls[phase, largest.dtype] += 1
            self.sent_bytes[phase, largest.dtype] += largest.numel() * largest.element_size()

    def types(self, *phases: str) -> set[torch.dtype]:
        """Returns the types that were sent in some phases."""
        return {dtype for phase, dtype in self.calls if phase in phases}


# Of this rank; a process trains one engine.
wire = Wire()
