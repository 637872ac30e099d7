"""The measurement of one engine in a rank, for a `model.py` and for a training script."""

import functools
import itertools
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from autotune.scoring import shared_cores
from autotune.space.candidate import Candidate
from autotune.space.deepspeed import RATE_KEYS, at_path
from autotune.system.machine import boot_id, cpu_limit
from autotune.trial.request import TrialRequest
from autotune.trial.result import MACHINE_BUSY, Observed
from autotune.worker.data import padding
from autotune.worker.data.witness import watch
from autotune.worker.measure import applied, groups, machine_load, witness
from autotune.worker.measure.batches import BatchObserver
from autotune.worker.measure.breakdown import Breakdown
from autotune.worker.measure.gradient_check import GradientWatch
from autotune.worker.measure.ledger import WINDOW_S, NotApplied, StepLedger, runs_ahead, skips_of
from autotune.worker.measure.memory import Memory
from autotune.worker.measure.noise import NoiseMeter
from autotune.worker.measure.recorder import Recorder
from autotune.worker.measure.witnesses import Idle

# Steps whose learning rates show how fast a schedule goes.
N_RATES = 2
# Steps whose sizes never fall by chance, and by how much the last one is larger where a curriculum makes them grow.
FEWEST_GROWING, GROWN = 8, 1.1
GROWS = (
    "batches grow from step to step, as in a curriculum: the answer is that of the first steps, of which a faster trial comes to larger"
    " ones; start the training at the size that most of its steps have"
)


class Meter:
    """Measures an engine: steps, phases, memory, gradients, and the configuration that ran.

    Attributes:
        data_parallel: Ranks that are fed different data; the stages of a pipeline share theirs.
        passes_at_boundary: The most backward passes of a step each of which DeepSpeed takes for the step's last.
        unsynced: The script has gone backward within `engine.no_sync()`, to add up gradients itself.
        rate_factor: What each update multiplies the script's learning rates by.
    """

    def __init__(
        self,
        recorder: Recorder,
        request: TrialRequest,
        engine: Any,
        batches: BatchObserver,
        memory: Memory,
        checkpointer: Any,
        noise: NoiseMeter | None = None,
        gradients: GradientWatch | None = None,
    ) -> None:
        self.recorder, self.report, self.request, self.engine = recorder, recorder.report, request, engine
        self.batches, self.memory, self.checkpointer = batches, memory, checkpointer
        self._refusals_before = memory.refusals
        self.noise, self.gradients = noise, gradients
        if gradients is not None and not getattr(engine, "managed_gradient_accumulation", lambda: True)():
            # Each step() is then one of the optimizer, and completes the gradients first.
            engine._take_model_step = functools.partial(self._before_update, engine._take_model_step)
        self.candidate = Candidate.of(request.candidate or {"micro_batch_size": 1})
        self.device = torch.device(engine.device)
        self.data_parallel = groups.data_parallel(engine)
        self.ledger = StepLedger(recorder, request, self.device, self.data_parallel, noise)
        if runs_ahead(engine):
            self.ledger.window_s = WINDOW_S["ahead"]
        self.ledger.share = applied.share_of(engine, self.data_parallel)
        breakdown = Breakdown(recorder, request, self.device, memory)
        self.take_apart, self.enter, self.loading = breakdown.take_apart, breakdown.enter, breakdown.loading
        self.afterwards: Callable[[], Iterator[None]] = breakdown.steps
        self._concluded = False
        self._rates, self.rate_factor = list[float](), 1.0
        self._beside, self._n_beside, self._updates = list[int](), 0, False
        self._others = register_optimizer_step_post_hook(self._note_other) if request.script is not None else None
        self.passes_at_boundary = self._n_at_boundary = 0
        self.unsynced = False
        watch.batches, watch.candidate = batches, self.candidate
        memory.enter("first_step")

    def begin(self) -> None:
        """Ends the warm-up: from here on steps are timed and memory is that of the steady state."""
        self.check_applied()
        self.batches.texts.row, self.batches.texts.keeps_row = None, False
        self.memory.enter("steady")
        if self.request.rivals:
            self.ledger.peak_bytes = self._highest_peak()
        self.recorder.enter("measure")
        if self.memory.device_watch is not None:
            self.memory.device_watch.begin(self.memory.uuid)
        self._busyness, self._cpu_before = machine_load.Busyness(), machine_load.own_cpu_s()
        self.ledger.log_slowdown = lambda: self._load()[1]

    def finish(self) -> None:
        """Completes the report of a trial at its end; all ranks take part.

        Raises:
            NotApplied: The configuration that ran differs from the candidate.
        """
        if not self._concluded:
            self.conclude()
        self.report.peak_memory_bytes = self.memory.finish()
        self.report.reserved_memory_bytes = self.memory.reserved_bytes

    def conclude(self) -> None:
        """Ends the measurement of steps; what follows counts for memory only. All ranks take part.

        Raises:
            NotApplied: The configuration that ran differs from the candidate.
        """
        self._concluded, report, memory = True, self.report, self.memory
        report.device_load = memory.device_watch.end() if memory.device_watch is not None else None
        self.check_applied()
        if self.noise is not None:
            report.noise = self.noise.terms(self.candidate.micro_batch_size)
        report.alloc_retries = memory.alloc_retries
        report.other_cores, report.log_slowdown = self._load()
        if (why := report.disturbed) and (report.rank == 0 or not memory.on_cpu):
            report.caveats.append(f"{MACHINE_BUSY}: {why} while steps were timed")
        if _grows(report.taken_in.get("elements", ())):
            report.caveats.append(GROWS)
        self._note_expected()

    def _note_expected(self) -> None:
        """Notes what a step takes in on average over the data set."""
        seen, candidate = self.batches.texts.lengths, self.candidate
        # A script's own sampler decides what comes together.
        unknown = self.batches.uneven and "token_budget" not in candidate.data_changes
        own = padding.expected(
            () if unknown else self.request.lengths, seen, candidate.micro_batch_size, candidate.data_changes, watch.grouped,
            flattened=self.batches.flattened, per_row=watch.per_row,
        )  # fmt: skip
        n_micro = candidate.gradient_accumulation_steps * self.data_parallel
        self.report.expected = {name: each * n_micro for name, each in own.items()}

    def backward(self) -> None:
        """Notes that a micro-batch went backward."""
        self.batches.backward()
        if self.engine.is_gradient_accumulation_boundary():
            # There DeepSpeed leaves gradients to a pass that follows.
            apart = getattr(self.engine, "inside_no_sync_ctxt", False)
            self._n_at_boundary += not apart
            self.unsynced |= apart and not getattr(self.engine.optimizer, "_coalesce_grad_reduction", False)
        if self.noise is not None:
            self.noise.backward()
        if self.gradients is not None:
            self.gradients.backward(self.engine)
            self._take_gradients()

    def _before_update(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.gradients is not None:
            self.gradients.compare(self.engine)
            self._take_gradients()
        return original(*args, **kwargs)

    def _take_gradients(self) -> None:
        """Notes the comparison of the first gradient, once it was made."""
        if self.gradients is not None and self.gradients.done:
            self.report.gradient, self.gradients = self.gradients.found, None

    def update(self, step: Callable[[], Any]) -> Any:
        """Calls the engine's step; reads the first learning rates and, where noise is measured, the gradient around it."""
        steps, self._updates = self.engine.global_steps, True
        rates = [self._rate()] if len(self._rates) < N_RATES else []
        if self.noise is None:
            result = step()
        else:
            whole, skips = self.noise.before_step(self.engine), skips_of(self.engine)
            result = step()
            if self.engine.global_steps > steps:
                self.noise.after_step(self.engine, whole, skipped=bool(skips_of(self.engine) > skips))
        self._updates = False
        if self.engine.global_steps > steps:
            self._rates += rates
            self.passes_at_boundary, self._n_at_boundary = max(self.passes_at_boundary, self._n_at_boundary), 0
            self._note_beside()
        return result

    def _note_other(self, *_: Any) -> None:
        """Counts a step of an optimizer that is none of the engine's."""
        self._n_beside += not self._updates

    def _note_beside(self) -> None:
        """Notes what other optimizers have stepped since the update before, of the first ones alone."""
        if self._others is not None:
            self._beside.append(self._n_beside)
            self._n_beside = 0
            if len(self._beside) == N_RATES:
                self._others.remove()
                self._others = None

    def _rate(self) -> float:
        """Returns the learning rates of all groups together, as the update takes them; 0 where the optimizer finds its own."""
        groups = getattr(getattr(self.engine, "basic_optimizer", None), "param_groups", ())
        return self.rate_factor * sum(float(group["lr"]) for group in groups if group.get("lr") is not None)

    def check_applied(self) -> None:
        """Compares the configuration that ran with the candidate; all ranks take part."""
        observed, request = self.observe(), self.request
        mismatch = observed.mismatch(self.candidate, self.data_parallel)
        # Of all ranks, since one may run another batch than the others.
        ran_out = self._highest(self.memory.refusals - self._refusals_before)
        if mismatch and ran_out:
            raise torch.OutOfMemoryError(f"out of memory, where the script goes on with another batch ({mismatch})")
        if mismatch:
            raise NotApplied(mismatch)
        # What the configuration states of learning rates is scaled to the batch.
        rates = {name for name in request.changed_from if name.rpartition(".")[2] in RATE_KEYS}
        asked = {
            name: at_path(request.ds_config, name) if name in rates else request.candidate.get(name)
            for name in request.changed_from
        }
        verdict = witness.judge(self.engine, asked, request.changed_from)
        # What does nothing with the weights of one stage of a pipeline may act in another.
        acted = self._highest(not verdict.inert)
        inert = {name: why for name, why in verdict.inert.items() if not (acted and isinstance(why, Idle))}
        if inert:
            raise NotApplied("; ".join(f"{name}: {why}" for name, why in inert.items()))
        self.report.observed = replace(observed, unwitnessed=verdict.unwitnessed)

    def observe(self) -> Observed:
        """Returns the configuration that ran, and notes it in the report; all ranks take part."""
        taken_in = self.report.taken_in
        found = applied.observe(
            self.engine, self.batches, self.checkpointer, taken_in, n_copies=self.data_parallel,
            by_script=self.request.script is not None,
        )  # fmt: skip
        if found.uneven is not None and self.request.candidate:
            # What a step holds on average, and not what this trial's steps happened to: global batches are compared by it.
            micro, steps = self.candidate.micro_batch_size, self.candidate.gradient_accumulation_steps
            found = replace(found, micro_batch_size=micro, samples_per_step=micro * steps * self.data_parallel)
        self.report.observed = replace(found, rates=tuple(self._rates), beside=tuple(self._beside))
        return self.report.observed

    def _load(self) -> tuple[float, float]:
        """Returns the cores that others kept busy since timing began, and what that did to step times, as the log of a factor.

        On the busiest machine of the trial; all ranks take part.
        """
        rows: list[Any] = [None] * dist.get_world_size()
        machine = boot_id() or platform.node()
        own_cpu_s, on_cpu = machine_load.own_cpu_s() - self._cpu_before, self.memory.on_cpu
        waited = self._busyness.waited() if on_cpu else 1.0
        dist.all_gather_object(rows, (machine, own_cpu_s, torch.get_num_threads(), waited))
        each_s, n_threads, waits = zip(*(own for where, *own in rows if where == machine), strict=True)
        used, wanted = self._busyness.cores_used_by_others(sum(each_s)), min(sum(n_threads), cpu_limit())
        slowdown = shared_cores.log_slowdown(used, wanted, self._busyness.n_cores, waits) if on_cpu else 0.0
        return self._highest(used), self._highest(slowdown)

    def _highest_peak(self) -> float:
        """Returns what the highest memory peak of all ranks is at least, as the trial's result counts it."""
        return self._highest(max(self.memory.least_bytes, self.memory.reserved_bytes or 0))

    def _highest(self, value: float) -> float:
        """Returns the maximum over all ranks."""
        highest = torch.tensor(float(value), dtype=torch.float64, device=self.device)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        return float(highest)


def _grows(sizes: Sequence[int]) -> bool:
    """Returns whether no step took in less than the one before, some twice more, and the last clearly more than the first.

    Batches that are padded to one of two lengths rise once by chance.
    """
    rises = all(before <= after for before, after in itertools.pairwise(sizes))
    return len(sizes) >= FEWEST_GROWING and rises and len({*sizes}) > 2 and sizes[-1] > GROWN * sizes[0]
