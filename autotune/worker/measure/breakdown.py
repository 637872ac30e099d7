"""Time and memory of a step by phase: by stopping after each phase; time also from torch's profiler."""

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from autotune.trial.request import TrialRequest
from autotune.worker.measure import recompute
from autotune.worker.measure.laps import synchronize
from autotune.worker.measure.memory import Memory
from autotune.worker.measure.phases import PHASES, PhaseClock
from autotune.worker.measure.recorder import Recorder

if TYPE_CHECKING:
    from autotune.worker.measure.trace import Tracer

# Steps taken apart before the traced ones; their median is reported.
STEPS_APART = 3
# A step that takes a larger share of a trial's budget is not made once more before memory is read.
LONG_STEP_SHARE = 0.2


class Breakdown:
    """Times the phases of chosen steps; ordinary steps are not slowed."""

    def __init__(self, recorder: Recorder, request: TrialRequest, device: torch.device, memory: Memory) -> None:
        self._recorder, self._request, self._device, self._memory = recorder, request, device, memory
        self._clock: PhaseClock | None = None
        self._counting = False
        self._phase, self._first = "", "script" if request.script is not None else "data"
        self._tracer: Tracer | None = None

    def take_apart(self) -> None:
        """Starts a step before those that are timed, which is taken apart by phase.

        On a CPU memory is read in the last step alone: what is handed back between the phases of this one would have to be
        taken anew in the first timed step.
        """
        if self._memory.on_cpu:
            self._memory.enter("")
        self.begin(counting=not self._memory.on_cpu)

    def begin(self, *, counting: bool) -> None:
        """Starts a step whose phases are timed; `counting` also reads the memory counters, which costs time."""
        self._clock = PhaseClock(functools.partial(synchronize, self._device), self._request.world_size)
        self._counting = counting
        recompute.timer = self._clock.recompute
        self._phase = self._first
        self._clock.open(self._first)

    def enter(self, phase: str) -> None:
        """Enters a phase of the step; a name that is no phase ends the step. Does nothing in ordinary steps."""
        self._phase = phase = phase if phase in PHASES else ""
        if self._tracer is not None:
            self._tracer.enter(phase)
        if self._clock is None or phase == self._clock.phase:
            return
        self._clock.close()
        if not phase:
            self._recorder.report.phase_times_s, self._clock = self._clock.end(), None
            recompute.timer = None
            return
        if self._counting and phase not in ("script", "data"):
            self._memory.enter(phase)
        self._clock.open(phase)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """While a script's loader makes a batch: the phase `data`, where the script itself had the time before."""
        between = self._phase == "script"
        if between:
            self.enter("data")
        try:
            yield
        finally:
            if between and self._phase == "data":  # a loader in another thread may end in another phase
                self.enter("script")

    def steps(self) -> Iterator[None]:
        """Yields before each step that follows the measurement: traced ones, if they are wanted, and that for memory."""
        report = self._recorder.report
        if self._request.traced_steps:
            yield from self._traced(self._request.traced_steps)
        if not self._memory.on_cpu:  # which was read in the steps before
            return
        times_s = report.phase_times_s
        self._memory.read_exactly()
        if report.step_times_s and report.step_times_s[-1] < LONG_STEP_SHARE * self._request.budget_s:
            yield  # threads of their own memory, as gloo's, hand it back when they next free some
        self.begin(counting=True)
        yield
        self.enter("")
        self._memory.enter("")
        report.phase_times_s = times_s

    def _traced(self, n_traced: int) -> Iterator[None]:
        report = self._recorder.report
        from autotune.worker.measure.trace import Tracer

        tables = []
        for _ in range(STEPS_APART):
            self.begin(counting=False)
            yield
            self.enter("")
            tables.append(report.phase_times_s)
        report.phase_times_s = {name: float(np.median([table[name] for table in tables])) for name in tables[0]}
        self._tracer = Tracer(self._recorder.folder.path, report.rank, cuda=self._device.type == "cuda")
        for _ in range(n_traced):
            self.enter(self._first)
            yield
            self.enter("")
        synchronize(self._device)
        report.traced, self._tracer = self._tracer.finish(n_traced), None
