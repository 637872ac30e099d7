"""A window of steps: what this rank notes between two comparisons of the ranks' clocks."""

from __future__ import annotations

import time
from typing import Any

import torch

from autotune.worker.measure.laps import Laps, synchronize
from autotune.worker.measure.ledger import StepLedger


class Window:
    """Consecutive optimizer steps on this rank; its clock starts at once.

    Args:
        engine: The DeepSpeed engine.
        ledger: Where the steps go.
    """

    def __init__(self, engine: Any, ledger: StepLedger) -> None:
        self._engine, self._ledger = engine, ledger
        self._losses: list[torch.Tensor] = []
        self._skipped: list[bool] = []
        self._ragged: list[bool] = []
        self._skipped_before = engine.skipped_steps
        self._laps, self._cpu_start = Laps(ledger.device), time.process_time()
        self._laps.start()

    def __len__(self) -> int:
        return len(self._losses)

    def add(self, loss: torch.Tensor, *, ragged: bool = False) -> None:
        """Ends an optimizer step.

        Args:
            loss: Its loss.
            ragged: It had fewer samples than other steps.
        """
        self._laps.lap()
        self._losses.append(loss)
        self._skipped.append(self._engine.skipped_steps > self._skipped_before)
        self._skipped_before = self._engine.skipped_steps
        self._ragged.append(ragged)

    def gather(self, n: int) -> None:
        """Adds the first n steps to the ledger; all ranks take part."""
        synchronize(self._ledger.device)
        cpu_s, laps_s = time.process_time() - self._cpu_start, self._laps.seconds()[:n]
        self._ledger.gather(laps_s, cpu_s, self._losses[:n], skipped=self._skipped[:n], ragged=self._ragged[:n])
