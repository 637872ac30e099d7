"""Step timer: wall clock, or events on CUDA."""

import time
from typing import Any

import numpy as np
import torch

from autotune.worker.device import accelerator


def synchronize(device: torch.device) -> None:
    """Waits for a device, of whatever kind."""
    if device.type != "cpu":
        accelerator().synchronize()


class Laps:
    """Times consecutive steps: on CUDA without waiting for the device, since events mark their ends in the stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._laps: list[tuple[str, Any, Any]] = []
        self._last: Any = None

    def start(self) -> None:
        """Starts the first lap, or the next one after a pause."""
        self._last = self._now()

    def lap(self, kind: str = "") -> None:
        """Ends a lap of a kind and starts the next one."""
        now = self._now()
        self._laps.append((kind, self._last, now))
        self._last = now

    def seconds(self) -> list[float]:
        """Returns the seconds of each lap; synchronize the device first."""
        return [start.elapsed_time(end) / 1e3 if self._cuda else end - start for _, start, end in self._laps]

    def medians_s(self) -> dict[str, float]:
        """Returns the median seconds of each kind of lap; synchronize the device first."""
        found: dict[str, list[float]] = {}
        for (kind, _, _), seconds in zip(self._laps, self.seconds(), strict=True):
            found.setdefault(kind, []).append(seconds)
        return {kind: float(np.median(times)) for kind, times in found.items()}

    def _now(self) -> Any:
        if not self._cuda:
            synchronize(self._device)
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
