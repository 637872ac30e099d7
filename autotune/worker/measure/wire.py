"""The types that ranks sent to each other in the step that is taken apart, by phase."""

from __future__ import annotations

from typing import Any

import torch

from autotune.worker.containers import tensors_in


class Wire:
    """Collectives of one step of this rank."""

    def __init__(self) -> None:
        self._sent: set[tuple[str, torch.dtype]] = set()

    def clear(self) -> None:
        """Forgets what was sent."""
        self._sent.clear()

    def note(self, phase: str, arguments: Any) -> None:
        """Notes a collective by the largest tensor of its arguments; one without tensors, as a barrier, sends nothing."""
        tensors = list(tensors_in(arguments))
        if tensors:
            largest = max(tensors, key=lambda tensor: tensor.numel() * tensor.element_size())
            self._sent.add((phase, largest.dtype))

    def types(self, *phases: str) -> set[torch.dtype]:
        """Returns the types that were sent in some phases."""
        return {dtype for phase, dtype in self._sent if phase in phases}


# Of this rank; a process trains one engine.
wire = Wire()
