"""The tail check of a trial: train on the worst batch, evaluate, save a checkpoint, and see whether all of that fits."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autotune.trial.request import TailCheck
from autotune.trial.result import Outcome
from autotune.worker.data import worst
from autotune.worker.data.samples import fixed_sizes
from autotune.worker.measure.batches import counted_tensor
from autotune.worker.measure.meter import Meter


class Tail:
    """The tail check of one engine, after its steps were measured.

    Attributes:
        check: What was asked for.
        n_micro: Micro-batches from which on gradients of earlier ones are held while another one is trained on.
    """

    def __init__(self, meter: Meter, check: TailCheck) -> None:
        self._meter, self.check, self.engine = meter, check, meter.engine
        self.n_micro = min(2, meter.candidate.gradient_accumulation_steps)
        meter.conclude()
        self._enter("tail")

    @classmethod
    def of(cls, meter: Meter) -> "Tail | None":
        """Begins the check that a trial's request asks for; None without one, or where the trial was stopped early."""
        check = meter.request.tail
        stopped = meter.report.outcome is Outcome.STOPPED_EARLY
        return None if check is None or stopped else cls(meter, check)

    def note(self, batch: Any, samples: int) -> None:
        """Notes the worst batch, before it goes forward: a trial that fails there says what it tried."""
        tensor = counted_tensor((batch,), {})
        fixed = fixed_sizes(self._meter.batches.noted.shapes)
        length = worst.length_in(tuple(tensor.shape), samples, fixed) if tensor is not None else 0
        self._meter.report.tail = {"samples": samples, "length": length, "elements": worst.size_of(batch)}

    def finish(self, evaluate: Callable[[], Any]) -> None:
        """Runs an evaluation step and saves a checkpoint, as far as they were asked for; all ranks take part."""
        engine = self.engine
        if self.check.evaluate:
            self._enter("evaluate")
            engine.eval()
            with torch.no_grad():
                evaluate()
            engine.train()
        if self.check.save:
            self._enter("save")
            _save(engine, self._meter.recorder.folder.scratch / "checkpoint")

    def _enter(self, phase: str) -> None:
        self._meter.recorder.enter(phase)
        self._meter.memory.enter(phase)


def _save(engine: Any, folder: Path) -> None:
    """Saves a checkpoint as a training does, and removes it."""
    method = type(engine).save_checkpoint
    save = getattr(method, "original", method)  # a script's own calls are skipped
    try:
        save(engine, str(folder))
        dist.barrier()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
