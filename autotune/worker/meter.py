"""The clock and the ledger of a trial's steps, whoever runs the loop: our own for a `model.py`, or the user's script."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from autotune import stats, trial
from autotune.candidate import Candidate
from autotune.convergence import falling
from autotune.trial import Observed, TrialRequest
from autotune.worker import observe
from autotune.worker.phases import PHASES, PhaseClock

if TYPE_CHECKING:
    from autotune.worker.gradients import GradientWatch
    from autotune.worker.kernels import Tracer
    from autotune.worker.noise import NoiseMeter
    from autotune.worker.run import Recorder

# Ranks compare their clocks after so long, not after every short step: waiting for the device and for one another would hide what
# overlaps from one step to the next, and count the slowest rank's time of each where in a training they make good for one another.
WINDOW_S = 0.05
MOST_IN_WINDOW = 100
# fp16 starts at a loss scale of 2^16 and halves it at each skip.
MOST_SKIPPED = 30
# Fewer say nothing of the step time.
LEAST_STEPS = stats.SETUP_STEPS + stats.LEAST_TIMED_STEPS
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
        noise: What takes the size of gradients, where the request asks for it.
        gradients: What follows gradients through the first step, where it asks for that.
    """

    def __init__(
        self,
        recorder: Recorder,
        request: TrialRequest,
        engine: Any,
        batches: observe.BatchObserver,
        memory: observe.Memory,
        checkpointer: Any,
        noise: NoiseMeter | None = None,
        gradients: GradientWatch | None = None,
    ) -> None:
        self.recorder, self.request, self.engine = recorder, request, engine
        self.batches, self.memory, self.checkpointer = batches, memory, checkpointer
        self.noise, self.gradients = noise, gradients
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
        if n >= LEAST_STEPS and self.elapsed_s >= self.request.budget_s:
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
        self.report.reason = (
            f"at best {min(timed):.3g} s a step{memory}: worse than trial {rival.trial} on every objective"
        )
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
        if self.noise is not None:
            self.report.noise = self.noise.terms(self.candidate.micro_batch_size)
        self.report.reserved_memory_bytes, self.report.alloc_retries = (
            self.memory.reserved_bytes,
            self.memory.alloc_retries,
        )
        others = self._cores_used_by_others()
        self.report.other_cores = others
        if others > trial.BUSY_CORES and self.report.rank == 0:
            self.report.caveats.append(
                f"the machine was busy: other processes used {others:.1f} cores while this trial was timed"
            )

    def backward(self) -> None:
        """A micro-batch went backward."""
        self.batches.backward()
        if self.noise is not None:
            self.noise.backward()
        if self.gradients is not None:
            self.gradients.backward(self.engine)
            if self.gradients.done:
                self.report.gradient, self.gradients = self.gradients.found, None

    def update(self, step: Callable[[], Any]) -> Any:
        """Has the engine take its step after a micro-batch, and looks at the gradient around it where that is asked for."""
        if self.noise is None:
            return step()
        whole, steps, skipped = self.noise.before_step(self.engine), self.engine.global_steps, self.engine.skipped_steps
        result = step()
        if self.engine.global_steps > steps:
            self.noise.after_step(self.engine, whole, skipped=self.engine.skipped_steps > skipped)
        return result

    def enough(self) -> bool:
        """Whether the step time is known well enough, and the data asked for was trained on.

        Where gradient noise is measured: whether that is known well enough, from a state that is not passed through at once. While
        the loss falls the noise scale grows, by several times in a short training, so half the budget is spent on coming closer.
        """
        if self.noise is not None:
            if not self.noise.terms(self.candidate.micro_batch_size).noise_scale().precise:
                return False
            return self.elapsed_s >= self.request.budget_s / 2 or not falling(
                [loss for loss in self.report.losses if loss is not None]
            )
        times = self.report.step_times_s
        trained = len(times) * self.candidate.global_batch_size(self.data_parallel)
        return trained >= self.request.min_samples and stats.measured_enough(times)

    def window_steps(self) -> int:
        """How many steps to train before the ranks compare their clocks."""
        times = self.report.step_times_s
        if len(times) < stats.SETUP_STEPS:
            return 1
        most = MOST_IN_WINDOW if self.elapsed_s < self.request.budget_s else LEAST_STEPS - len(times)
        return max(1, min(most, int(WINDOW_S / max(times[-1], 1e-6)), self.request.max_steps - len(times)))

    def gather(
        self,
        laps_s: Sequence[float],
        cpu_s: float,
        losses: Sequence[torch.Tensor],
        *,
        skipped: Sequence[bool],
        ragged: Sequence[bool],
    ) -> None:
        """Adds the steps of a window as all ranks together saw them, so that all hold the same numbers.

        Args:
            laps_s: Seconds of each step on this rank, one after the other.
            cpu_s: This rank's process time over all of them.
            losses: Loss of each step.
            skipped: Whether loss scaling skipped its update.
            ragged: Whether it had fewer samples than others have.

        Raises:
            Diverged: The loss is not finite, or loss scaling finds no scale.
            NotApplied: Too many steps in a row were smaller.
        """
        n = len(laps_s)
        columns = [*laps_s, *map(float, skipped), *map(float, ragged), *map(float, losses)]
        own = torch.tensor(columns, dtype=torch.float64, device=self.device)
        rows = [torch.empty_like(own) for _ in range(self.request.world_size)]
        dist.all_gather(rows, own)
        table = torch.stack(rows).cpu().reshape(self.request.world_size, 4, n)
        # Together they last as long as the slowest rank takes; how that divides among them the ranks need not see alike.
        own_s = table[:, 0].sum(dim=1)
        shares = table[:, 0].mean(dim=0) / own_s.mean().clamp(min=1e-12)
        self.elapsed_s += float(own_s.max())
        times, means = (shares * own_s.max()).tolist(), table[:, 3].mean(dim=0).tolist()
        skips, smaller = (table[:, row].any(dim=0).tolist() for row in (1, 2))
        if self.noise is not None:
            self.noise.leave_out([a or b for a, b in zip(skips, smaller, strict=True)])
        before = len(self.report.step_times_s)
        for i in range(n):
            self._add(times[i], cpu_s / n, means[i], skipped=skips[i], ragged=smaller[i])
        if self.report.rank == 0 and len(self.report.step_times_s) > before:
            last = {"step_time_s": self.report.step_times_s[-1], "loss": self.report.losses[-1]}
            self.recorder.event(step=len(self.report.step_times_s), **last)

    def _add(self, time_s: float, cpu_s: float, loss: float, *, skipped: bool, ragged: bool) -> None:
        """Adds a step, unless its time and loss are none of this configuration's."""
        finite = bool(np.isfinite(loss))
        if skipped:
            # fp16 needs some skips to find its scale; a loss that is not finite itself, or skips without end, is no search for one.
            self.skipped += 1
            spent = self.elapsed_s >= self.request.budget_s and len(self.report.step_times_s) < LEAST_STEPS
            if self.skipped > MOST_SKIPPED or not finite or spent:
                raise Diverged(f"{self.skipped} updates were skipped because gradients were not finite")
            return
        self.skipped = 0
        if ragged:  # the last, smaller batch of an epoch
            self.ragged += 1
            if self.ragged > MOST_RAGGED:
                raise NotApplied("the samples of an optimizer step vary")
            return
        self.ragged = 0
        self.report.step_times_s.append(time_s)
        self.report.cpu_times_s.append(cpu_s)
        self.report.losses.append(loss if finite else None)
        if not finite:
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


class Laps:
    """Times steps, or parts of them, without waiting for the device: on CUDA events mark the ends in the stream, else the wall does.

    Args:
        device: Where they run.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._laps: list[tuple[str, Any, Any]] = []
        self._last: Any = None

    def start(self) -> None:
        """The first, or the next after a pause, begins."""
        self._last = self._now()

    def lap(self, kind: str = "") -> None:
        """One of that kind ends, and another one may begin."""
        now = self._now()
        self._laps.append((kind, self._last, now))
        self._last = now

    def forget(self) -> None:
        """Leaves out what was timed so far."""
        self._laps.clear()

    def seconds(self) -> list[float]:
        """How long each took; the device has been synchronised."""
        return [start.elapsed_time(end) / 1e3 if self._cuda else end - start for _, start, end in self._laps]

    def medians_s(self) -> dict[str, float]:
        """Median seconds of each kind; the device has been synchronised."""
        found: dict[str, list[float]] = {}
        for (kind, _, _), seconds in zip(self._laps, self.seconds(), strict=True):
            found.setdefault(kind, []).append(seconds)
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
