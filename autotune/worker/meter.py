"""The clock and the ledger of a trial's steps, whoever runs the loop: our own for a `model.py`, or the user's script."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from autotune import stats, trial
from autotune.candidate import Candidate
from autotune.trial import Observed, TrialRequest
from autotune.worker import observe
from autotune.worker.phases import PHASES, PhaseClock

if TYPE_CHECKING:
    from autotune.worker.kernels import Tracer
    from autotune.worker.run import Recorder

# On CUDA, steps shorter than this are timed in windows, so that synchronising does not hide what overlaps.
WINDOW_S = 0.05
# fp16 starts at a loss scale of 2^16 and halves it at each skip.
MOST_SKIPPED = 30
# Steps that are taken apart before the traced ones.
APART = 3
# An epoch ends with at most one smaller step; several in a row are the script's own way.
MOST_RAGGED = 3


class Diverged(Exception):
    """The loss is not finite any more."""


class NotApplied(Exception):
    """Something else ran than what was asked for."""


class Meter:
    """What a rank knows of its steps. All ranks see the same gathered numbers, so all of them stop at the same step.

    Args:
        recorder: Where the report grows.
        request: What is measured.
        engine: The DeepSpeed engine.
        batches: What watches its batches.
        memory: What watches its memory.
        checkpointer: What recomputes its blocks, or sees who does, if anything does.
    """

    def __init__(
        self,
        recorder: Recorder,
        request: TrialRequest,
        engine: Any,
        batches: observe.BatchObserver,
        memory: observe.Memory,
        checkpointer: Any,
    ) -> None:
        self.recorder, self.request, self.engine = recorder, request, engine
        self.batches, self.memory, self.checkpointer = batches, memory, checkpointer
        self.report = recorder.report
        self.candidate = Candidate.of(request.candidate or {"micro_batch_size": 1})
        self.device = torch.device(engine.device)
        self.cuda = self.device.type == "cuda"
        # Ranks with data of their own; the stages of a pipeline share theirs.
        self.data_parallel = int(getattr(engine, "dp_world_size", None) or request.world_size)
        self.elapsed_s = 0.0
        self.skipped = self.ragged = 0
        self._next_look = stats.SETUP_STEPS + stats.MIN_TIMED_STEPS
        self._clock: PhaseClock | None = None
        self._counting = False
        self._tracer: Tracer | None = None
        memory.enter("first_step")

    def begin(self) -> None:
        """The first steps are over: from here on steps are timed and memory is the steady state's."""
        self.check_applied()
        self.memory.enter("steady")
        self._peak_bytes = self._highest_peak() if self.request.rivals else 0.0
        self.recorder.enter("measure")
        self._busyness, self._cpu_before = observe.Busyness(), time.process_time()

    def take_apart(self, *, counting: bool = True) -> None:
        """Begins a step with the clock stopped after each phase; `enter` goes from one to the next.

        Args:
            counting: Read the memory counters at each phase, too; what gives memory back for that costs time.
        """
        self._clock, self._counting = PhaseClock(self.synchronize, self.request.world_size), counting
        if isinstance(self.checkpointer, observe.Checkpointer):
            self.checkpointer.timer = self._clock.recompute
        self._clock.open("data")

    def enter(self, phase: str) -> None:
        """In a step that is taken apart or traced: closes the phase under way; a name that is no phase ends the step."""
        phase = phase if phase in PHASES else ""
        if self._tracer is not None:
            self._tracer.enter(phase)
        if self._clock is None or phase == self._clock.phase:
            return
        self._clock.close()
        if not phase:
            self.report.phase_times_s, self._clock = self._clock.end(), None
            if isinstance(self.checkpointer, observe.Checkpointer):
                self.checkpointer.timer = None
            return
        if self._counting and phase != "data":
            self.memory.enter(phase)
        self._clock.open(phase)

    def afterwards(self) -> Iterator[None]:
        """What follows the measurement where a trace is wanted: steps taken apart, then traced ones; yields before each of them."""
        if not self.request.traced_steps:
            return
        from autotune.worker.kernels import Tracer

        tables = []
        for _ in range(APART):
            self.take_apart(counting=False)
            yield
            self.enter("")
            tables.append(self.report.phase_times_s)
        self.report.phase_times_s = {name: float(np.median([table[name] for table in tables])) for name in tables[0]}
        self._tracer = Tracer(self.recorder.folder.path, self.report.rank, cuda=self.cuda)
        for _ in range(self.request.traced_steps):
            self.enter("data")
            yield
            self.enter("")
        self.synchronize()
        self.report.traced, self._tracer = self._tracer.finish(self.request.traced_steps), None

    def done(self) -> bool:
        """Whether the measurement may end; looks again after every tenth more of steps."""
        n = len(self.report.step_times_s)
        if n >= self.request.max_steps or self.beaten():
            return True
        if n < self._next_look:
            return False
        self._next_look = max(n + 1, int(n * 1.1))
        return self.enough()

    def beaten(self) -> bool:
        """Whether the trial cannot be better than what was measured before; all ranks look at the same gathered numbers."""
        rival = trial.beaten_by(self.request.rivals, self.report.step_times_s, self._peak_bytes)
        if rival is None:
            return False
        timed = self.report.step_times_s[stats.SETUP_STEPS :]
        memory = f" and at least {self._peak_bytes / 2**20:.0f} MiB" if rival.peak_memory_bytes is not None else ""
        self.report.outcome = trial.Outcome.STOPPED_EARLY
        self.report.reason = f"at best {min(timed):.3g} s a step{memory}: worse than trial {rival.trial} on every objective"
        return True

    def _cores_used_by_others(self) -> float:
        """Cores that other processes kept busy meanwhile, on the machine of the trial where they were most."""
        rows: list[Any] = [None] * dist.get_world_size()
        machine = observe.machine_id()
        dist.all_gather_object(rows, (machine, time.process_time() - self._cpu_before))
        others = self._busyness.cores_used_by_others(sum(cpu_s for where, cpu_s in rows if where == machine))
        most = torch.tensor(others, dtype=torch.float64, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return float(most)

    def _highest_peak(self) -> float:
        """The highest memory peak of all ranks so far, as the trial's result will count it."""
        own = max([*self.memory.peaks.values(), self.memory.reserved_bytes or 0])
        highest = torch.tensor(float(own), dtype=torch.float64, device=self.device)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        return float(highest)

    def finish(self) -> None:
        """Completes the report; all ranks take part.

        Raises:
            NotApplied: Something else ran than what was asked for.
        """
        self.check_applied()
        self.report.peak_memory_bytes = self.memory.finish()
        self.report.reserved_memory_bytes, self.report.alloc_retries = self.memory.reserved_bytes, self.memory.alloc_retries
        others = self._cores_used_by_others()
        self.report.other_cores = others
        if others > trial.BUSY_CORES and self.report.rank == 0:
            self.report.caveats.append(f"the machine was busy: other processes used {others:.1f} cores while this trial was timed")

    def enough(self) -> bool:
        """Whether the step time is known well enough, or the budget is spent."""
        times = self.report.step_times_s
        if self.elapsed_s >= self.request.budget_s:
            return True
        trained = len(times) * self.candidate.global_batch_size(self.data_parallel)
        return trained >= self.request.min_samples and stats.measured_enough(times)

    def window_steps(self) -> int:
        """How many steps to time at once."""
        times = self.report.step_times_s
        if not self.cuda or len(times) < stats.SETUP_STEPS:
            return 1
        return max(1, min(100, int(WINDOW_S / max(times[-1], 1e-6)), self.request.max_steps - len(times)))

    def gather(self, wall: float, cpu: float, losses: list[torch.Tensor], *, skipped: int, ragged: bool = False) -> None:
        """Adds the steps of a window as the slowest rank saw them, so that all ranks hold the same numbers.

        Args:
            wall: Seconds that the window took on this rank.
            cpu: Its process time.
            losses: Loss of each step.
            skipped: Updates in it that loss scaling skipped.
            ragged: A step of it had fewer samples than the others.

        Raises:
            Diverged: The loss is not finite, or loss scaling finds no scale.
        """
        own = torch.tensor(
            [wall, cpu, float(skipped), float(ragged), *(float(loss) for loss in losses)], dtype=torch.float64, device=self.device
        )
        rows = [torch.empty_like(own) for _ in range(self.request.world_size)]
        dist.all_gather(rows, own)
        table = torch.stack(rows).cpu()
        slowest = float(table[:, 0].max())
        self.elapsed_s += slowest
        n = len(losses)
        means = table[:, 4:].mean(dim=0).tolist()
        if table[:, 2].any():
            # Loss scaling skipped the update: neither its time nor its loss is a step's. fp16 needs some skips to find its
            # scale; a loss that is not finite itself, or skips without end, is no search for a scale.
            self.skipped += int(table[:, 2].max())
            if self.skipped > MOST_SKIPPED or not np.isfinite(means).all() or self.elapsed_s >= self.request.budget_s:
                raise Diverged(f"{self.skipped} updates were skipped because gradients were not finite")
            return
        if table[:, 3].any():  # the last, smaller batch of an epoch: no step of this configuration
            self.ragged += 1
            if self.ragged > MOST_RAGGED:
                raise NotApplied("the samples of an optimizer step vary")
            return
        self.skipped = self.ragged = 0
        self.report.step_times_s += [slowest / n] * n
        self.report.cpu_times_s += [cpu / n] * n
        self.report.losses += [mean if np.isfinite(mean) else None for mean in means]
        if self.report.rank == 0:
            self.recorder.event(step=len(self.report.step_times_s), step_time_s=slowest / n, loss=self.report.losses[-1])
        if None in self.report.losses[-n:]:
            raise Diverged(f"the loss was not finite at step {len(self.report.losses)}")

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def check_applied(self) -> None:
        """Compares what really ran with what was asked for; all ranks take part.

        Raises:
            NotApplied: It differs.
        """
        mismatch = self.observe().mismatch(self.candidate, self.data_parallel)
        if mismatch:
            raise NotApplied(mismatch)

    def observe(self) -> Observed:
        """Reads from the engine and the batches what really ran; all ranks take part."""
        seen, engine = self.batches, self.engine
        # The later stages of a pipeline pass on what the first one took in.
        first_stage = getattr(engine, "stage_id", 0) == 0
        local = max(seen.samples_per_step, default=0), max(seen.tokens_per_step, default=0)
        sums = torch.tensor(local if first_stage else (0, 0), dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        if not hasattr(engine, "stage_id"):
            sums //= self.request.world_size // self.data_parallel  # tensor-parallel ranks are fed the same
        # DeepSpeed before 0.17 knows no torch_autocast.
        autocast = engine.torch_autocast_dtype() if getattr(engine, "torch_autocast_enabled", bool)() else None
        # At stage 3 and under autocast the weights carry the type too; buffers of other types do not count.
        dtypes = [parameter.dtype for parameter in engine.module.parameters() if parameter.is_floating_point()]
        observed = Observed(
            micro_batch_size=only(seen.micro_batch_sizes),
            loader_batch_size=only(seen.loader_batch_sizes),
            gradient_accumulation_steps=only(seen.backward_counts),
            samples_per_step=int(sums[0]),
            tokens_per_step=int(sums[1]) or None,
            zero_stage=int(engine.zero_optimization_stage()),
            dtype=str(max(set(dtypes), key=dtypes.count)).removeprefix("torch."),
            autocast=str(autocast).removeprefix("torch.") if autocast else None,
            checkpointed_blocks=len(self.checkpointer.recomputed) if self.checkpointer else 0,
        )
        if hasattr(engine, "stage_id"):
            observed = _of_all_stages(observed, self.data_parallel)
        self.report.observed = observed
        return observed


class MicroClock:
    """Times micro-steps without waiting for the device: what an inner and a boundary one take prices every accumulation.

    Args:
        device: Where they run. On CUDA events mark their ends in the stream; else the wall does.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._pending: list[tuple[str, Any, Any]] = []
        self._last: Any = None

    def start(self) -> None:
        """A micro-step begins."""
        self._last = self._now()

    def lap(self, kind: str) -> None:
        """A micro-step of that kind ends, and another one may begin."""
        now = self._now()
        self._pending.append((kind, self._last, now))
        self._last = now

    def forget(self) -> None:
        """Leaves out what was timed so far."""
        self._pending.clear()

    def medians_s(self) -> dict[str, float]:
        """Median seconds of each kind; the device has been synchronised."""
        found: dict[str, list[float]] = {}
        for kind, start, end in self._pending:
            found.setdefault(kind, []).append(start.elapsed_time(end) / 1e3 if self._cuda else end - start)
        return {kind: float(np.median(times)) for kind, times in found.items()}

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _of_all_stages(own: Observed, n_copies: int) -> Observed:
    """What a pipeline's first stage saw of the data, and what the stages of one copy recomputed."""
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, own)
    first: Observed = rows[0]
    return replace(first, checkpointed_blocks=sum(row.checkpointed_blocks for row in rows) // n_copies)


def only(values: set[int]) -> int | None:
    """The value of a set of one."""
    return next(iter(values)) if len(values) == 1 else None
