"""The ledger of a trial's steps: gather their times and losses from all ranks, and decide when to stop."""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from autotune.scoring import step_times
from autotune.scoring.convergence.noise_scale import falling, noise_scale_of
from autotune.space.candidate import Candidate
from autotune.system.units import format_seconds
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome
from autotune.worker.containers import number_in
from autotune.worker.measure.batches import TAKEN_IN, Ragged, StepCount
from autotune.worker.measure.gradient_check import autocast_scaler
from autotune.worker.measure.laps import Laps, synchronize
from autotune.worker.measure.noise import NoiseMeter
from autotune.worker.measure.recorder import Recorder

# Ranks compare clocks once a window, not after each step: waiting for the device and for each other would hide what
# overlaps between steps (the next batch is drawn while the device computes), and a rank that is late in one step could
# not catch up in the next. A window has at least two steps, unless a step takes seconds. On a device they are longer, and
# longest where a training keeps it busy without a pause (`runs_ahead`): there the time until it has its first batch is in
# the window and not in the training, 20 ms being 4 % of half a second.
WINDOW_S = {"cpu": 0.2, "device": 0.5, "ahead": 2.0}
LONG_STEP_S = 2.0
MAX_WINDOW_STEPS = 100
# fp16 starts at a loss scale of 2^16 and halves it at each skip.
MAX_SKIPPED_UPDATES = 30
# DeepSpeed returns from a step that overflows before it calls torch's scaler (stage_1_and_2.py, stage3.py).
NO_SCALE = ": under ZeRO DeepSpeed never lowers the loss scale of torch's autocast; take ZeRO stage 0, or torch_autocast (bf16)"
# Fewer steps give no interval of the step time.
MIN_STEPS = step_times.SETUP_STEPS + step_times.LEAST_TIMED_STEPS
# Share of the deadline that a trial spends at most: its end takes time, too.
WITHIN_DEADLINE = 0.95
HURRIED = "fewer steps were timed than an interval takes, since the trial's deadline was near: `--trial-deadline` gives it more time"
# Ends of epochs in a row, each with smaller steps, after which smaller steps count as they come.
MAX_ENDS_IN_A_ROW = 3
FEWER = "some steps have fewer samples than others although no epoch ends there: they count as they come"
# Steps of a kind that is left out beyond the number of others: the first few may be such wherever the epoch stands.
SPARE_STEPS = 1
EVALUATES = "the script evaluates between its steps: that is left out of the step time, but takes time of each trial"


class Diverged(Exception):
    """The loss is no longer finite."""


class NotApplied(Exception):
    """The configuration that ran differs from the candidate."""


class TooFewSteps(Exception):
    """The script ended by itself before its steps could be timed: its data or its loop has too few for the candidate."""


class StepLedger:
    """Times and losses of optimizer steps. All ranks hold the same numbers, so that all stop at the same step.

    Attributes:
        elapsed_s: Time of all steps but the first, which loads or compiles kernels: on a GPU, half of a short budget.
        peak_bytes: Highest memory peak of all ranks when timing began.
        uneven: A probe found that the samples of a step vary.
        plays: A rank trains on what it calls the engine on without gradients: no such call is an evaluation.
        window_s: Seconds of steps between two comparisons of the ranks' clocks.
        log_slowdown: Returns what other processes have done to the steps since timing began; all ranks take part.
    """

    def __init__(
        self,
        recorder: Recorder,
        request: TrialRequest,
        device: torch.device,
        n_replicas: int,
        noise: NoiseMeter | None = None,
    ) -> None:
        self.recorder, self.report, self.request = recorder, recorder.report, request
        self.device, self.noise = device, noise
        self.window_s = WINDOW_S["cpu" if device.type == "cpu" else "device"]
        self.log_slowdown: Callable[[], float] = lambda: 0.0
        candidate = Candidate.of(request.candidate or {"micro_batch_size": 1})
        self._micro_batch_size = candidate.micro_batch_size
        self._why_skipped = NO_SCALE if candidate.precision == "torch_autocast_fp16" and candidate.zero_stage else ""
        self._global_batch_size = candidate.micro_batch_size * candidate.gradient_accumulation_steps * n_replicas
        self.elapsed_s = self.peak_bytes = self._since_start_s = 0.0
        self.uneven = self.plays = self._began = False
        self.skipped = self._ends_in_a_row = self._n_ragged = 0
        self._aside_s = 0.0
        self._n_evaluated = self._n_others = 0
        # Of what the ranks take in, this share counts: ranks that train one copy of the model take in the same.
        self.share = 1.0
        self._next_look = step_times.SETUP_STEPS + step_times.MIN_TIMED_STEPS

    def window_steps(self) -> int:
        """Returns the steps to train before the ranks compare their clocks."""
        times = self.report.step_times_s
        if len(times) < step_times.SETUP_STEPS:
            return 1
        limit = MAX_WINDOW_STEPS if self.elapsed_s < self.request.budget_s else MIN_STEPS - len(times)
        step_s = self._next_step_s()
        wanted = max(int(self.window_s / step_s), 2 if step_s < LONG_STEP_S else 1)
        return max(1, min(limit, wanted, self.request.max_steps - len(times)))

    def _next_step_s(self) -> float:
        """Returns what a step takes, evaluations between steps included."""
        times = self.report.step_times_s
        return max(times[-1], 1e-6) + self._aside_s / len(times)

    def gather(
        self,
        laps_s: Sequence[float],
        cpu_s: float,
        losses: Sequence[torch.Tensor | float],
        *,
        skipped: Sequence[bool],
        counts: Sequence[StepCount],
        aside_s: Sequence[float] = (),
    ) -> None:
        """Adds a window of steps; all ranks take part.

        Args:
            laps_s: Seconds of each step on this rank.
            cpu_s: This rank's process time over all of them.
            skipped: Whether loss scaling skipped its update.
            aside_s: Seconds of each step that went into an evaluation.

        Raises:
            Diverged: The loss is not finite, or loss scaling finds no scale.
            NotApplied: Most steps have fewer samples than others.
        """
        n = len(laps_s)
        columns = [*laps_s, *map(float, skipped), *(float(count.ragged) for count in counts), *map(float, losses)]
        columns += [-1.0] * n if self.plays else aside_s or [0.0] * n
        for name in TAKEN_IN:
            columns += [float(getattr(count, name)) * self.share for count in counts]
        columns += [time.monotonic() - self.recorder.began_s] * n
        own = torch.tensor(columns, dtype=torch.float64, device=self.device)
        rows = [torch.empty_like(own) for _ in range(self.request.world_size)]
        dist.all_gather(rows, own)
        table = torch.stack(rows).cpu().reshape(self.request.world_size, 6 + len(TAKEN_IN), n)
        # The ranks began the window together; a step ends when the last of them has ended it.
        total_s = float(table[:, 0].sum(dim=1).max())
        if self._began:
            self.elapsed_s += total_s
        self._began = True
        # One rank may evaluate, and the others wait.
        self.plays = bool((table[:, 4] < 0).any())
        aside = table.new_tensor(self._set_aside(table[:, 4].max(dim=0).values.tolist()))
        ends_s = (table[:, 0] - aside).clamp(min=0).cumsum(dim=1).max(dim=0).values
        times, means = ends_s.diff(prepend=ends_s.new_zeros(1)).tolist(), table[:, 3].mean(dim=0).tolist()
        skips, smaller = (table[:, row].max(dim=0).values.tolist() for row in (1, 2))
        self._since_start_s = float(table[:, -1].max())
        taken_in = table[:, 5:-1].sum(dim=0).round().long().T.tolist()
        if self.noise is not None:
            self.noise.leave_out([bool(a or b) for a, b in zip(skips, smaller, strict=True)])
        cpu_s *= sum(times) / total_s if total_s else 1.0
        before = len(self.report.step_times_s)
        for i in range(n):
            self._add(
                times[i], cpu_s / n, means[i], taken_in[i], skipped=bool(skips[i]), ragged=Ragged(int(smaller[i]))
            )
        if self.report.rank == 0 and len(self.report.step_times_s) > before:
            last = {"step_time_s": self.report.step_times_s[-1], "loss": self.report.losses[-1]}
            self.recorder.event(step=len(self.report.step_times_s), **last)

    def _set_aside(self, aside_s: Sequence[float]) -> list[float]:
        """Returns the seconds of each step that are no part of it; what most steps have in them is one, as a rollout."""
        found: list[float] = []
        if self.plays:
            self.report.caveats = [each for each in self.report.caveats if each != EVALUATES]
            return [0.0] * len(aside_s)
        for seconds in aside_s:
            self._n_evaluated += seconds > 0
            self._n_others += seconds == 0
            found.append(seconds if self._n_evaluated <= self._n_others + SPARE_STEPS else 0.0)
        self._aside_s += sum(found)
        if sum(found) and self._n_others and EVALUATES not in self.report.caveats:
            self.report.caveats.append(EVALUATES)
        return found

    def _add(
        self, time_s: float, cpu_s: float, loss: float, taken_in: Sequence[int], *, skipped: bool, ragged: Ragged
    ) -> None:
        """Adds a step unless loss scaling skipped it or it is the shorter end of an epoch."""
        finite = bool(np.isfinite(loss))
        if skipped:
            # fp16 needs some skips to find its scale; a loss that is not finite, or endless skips, are no such search.
            self.skipped += 1
            if not finite:
                raise Diverged(f"the loss was not finite at step {len(self.report.losses) + 1}")
            if self.skipped > MAX_SKIPPED_UPDATES:
                said = f"{self.skipped} updates were skipped because gradients were not finite"
                raise Diverged(said + self._why_skipped)
            return
        self.skipped = 0
        if ragged and self._is_set_aside(ragged):
            return
        self._ends_in_a_row = self._ends_in_a_row if ragged else 0
        for name, amount in zip(TAKEN_IN, taken_in, strict=True):
            self.report.taken_in.setdefault(name, []).append(amount)
        self.report.step_times_s.append(time_s)
        self.report.cpu_times_s.append(cpu_s)
        self.report.losses.append(loss if finite else None)
        if not finite:
            raise Diverged(f"the loss was not finite at step {len(self.report.losses)}")

    def _is_set_aside(self, ragged: Ragged) -> bool:
        """Returns whether a step with fewer samples is the end of an epoch, which is left out; others count as they come."""
        self._n_ragged += 1
        self._ends_in_a_row += ragged is not Ragged.SAME_END
        n = len(self.report.step_times_s)
        varies = ragged is Ragged.VARIES or self._ends_in_a_row > MAX_ENDS_IN_A_ROW
        many = self._n_ragged > n + SPARE_STEPS
        if not self.request.candidate:  # a probe finds out
            self.uneven = self.uneven or varies or many or ragged is Ragged.UNSAID_END
            return True
        if many:
            raise NotApplied(
                f"most optimizer steps ({self._n_ragged} of {self._n_ragged + n}) have fewer samples than another one: where"
                " epochs end that often, give the script more data, or a loader with drop_last=True"
            )
        if varies and FEWER not in self.report.caveats:
            self.report.caveats.append(FEWER)
        return not varies

    def done(self) -> bool:
        """Returns whether the measurement may end; precision is looked at after every 10 % more steps only."""
        n = len(self.report.step_times_s)
        if n >= self.request.max_steps or self._beaten():
            return True
        if n >= MIN_STEPS and self.elapsed_s >= self.request.budget_s:
            return True
        if n >= step_times.FEWEST_STEPS and self._deadline_is_near():
            if n < MIN_STEPS:
                self.report.caveats.append(HURRIED)
            return True
        if n < self._next_look:
            return False
        self._next_look = max(n + 1, int(n * 1.1))
        return self._precise()

    def _deadline_is_near(self) -> bool:
        """Returns whether one more timed step, and that for memory, would pass the deadline, at which nothing is kept."""
        return self._since_start_s + 2 * self._next_step_s() > WITHIN_DEADLINE * self.request.deadline_s

    def _beaten(self) -> bool:
        """Returns whether an earlier trial is certainly better on every objective; then notes the outcome."""
        sizes = self.report.taken_in.get("elements", ())
        seen = self.request.rivals, self.report.step_times_s, self.peak_bytes, sizes
        # The ranks agree on the first answer, so that all of them look at the load or none.
        if step_times.beaten_by(*seen) is None:
            return False
        rival = step_times.beaten_by(*seen, log_slowdown=self.log_slowdown())
        if rival is None:
            return False
        timed = self.report.step_times_s[step_times.SETUP_STEPS :]
        memory = f" and at least {self.peak_bytes / 2**20:.0f} MiB" if rival.peak_memory_bytes is not None else ""
        self.report.outcome = Outcome.STOPPED_EARLY
        took = f"at best {format_seconds(min(timed))} a step"
        self.report.reason = f"{took}{memory}: worse than trial {rival.trial} had read on every objective"
        return True

    def _precise(self) -> bool:
        """Returns whether the step time, or the gradient noise if that is measured, is known well enough.

        While the loss falls the noise scale grows, several times over in a short training, so half the budget goes into
        training first.
        """
        if self.noise is not None:
            if not noise_scale_of(self.noise.terms(self._micro_batch_size)).precise:
                return False
            losses = [loss for loss in self.report.losses if loss is not None]
            return self.elapsed_s >= self.request.budget_s / 2 or not falling(losses)
        times = self.report.step_times_s
        trained = len(times) * self._global_batch_size
        return trained >= self.request.min_samples and step_times.measured_enough(times, self.report.taken_in)


class Window:
    """Consecutive optimizer steps of this rank between two comparisons of the clocks; its own clock starts at once."""

    def __init__(self, engine: Any, ledger: StepLedger) -> None:
        self._engine, self._ledger, self._n_wanted = engine, ledger, ledger.window_steps()
        self._losses: list[torch.Tensor | float] = []
        self._skips = [skips_of(engine)]
        self._counts: list[StepCount] = []
        # Of each lap, the step that it belongs to, and whether it was an evaluation.
        self._pieces: list[tuple[int, bool]] = []
        # Between windows ranks do unequal work (one writes events): here they wait for the last, not in a timed step.
        dist.barrier()
        self._laps = Laps(ledger.device)
        self.restart()

    def __len__(self) -> int:
        return len(self._losses)

    def restart(self) -> None:
        """Starts the clock, also again after what belongs to no step."""
        self._cpu_start = time.process_time()
        self._laps.start()

    def cut(self, *, aside: bool) -> None:
        """Ends a part of a step; `aside` is one that the step's time may leave out."""
        self._laps.lap()
        self._pieces.append((len(self), aside))

    def plays(self) -> None:
        """Notes that calls without gradients are part of the steps."""
        self._ledger.plays = True

    @property
    def full(self) -> bool:
        """Returns whether the ranks are to compare their clocks now."""
        return len(self._losses) >= self._n_wanted

    def add(self, loss: torch.Tensor | float, count: StepCount) -> None:
        """Ends an optimizer step, which took in what `count` says."""
        self.cut(aside=False)
        self._losses.append(number_in(loss) if isinstance(loss, torch.Tensor) else loss)
        self._skips.append(skips_of(self._engine))
        self._counts.append(count)

    def gather(self, n: int) -> None:
        """Adds the first n steps to the ledger; all ranks take part."""
        synchronize(self._ledger.device)
        cpu_s, laps_s, aside_s = time.process_time() - self._cpu_start, [0.0] * n, [0.0] * n
        for (i, aside), seconds in zip(self._pieces, self._laps.seconds(), strict=True):
            if i < n:
                laps_s[i] += seconds
                aside_s[i] += seconds * aside
        skipped = [after > before for before, after in itertools.pairwise(map(float, self._skips[: n + 1]))]
        self._ledger.gather(laps_s, cpu_s, self._losses[:n], skipped=skipped, counts=self._counts[:n], aside_s=aside_s)

    def gather_rest(self) -> None:
        """Adds the steps that all ranks have made so far; all ranks take part."""
        n = torch.tensor(len(self), device=self._ledger.device)
        dist.all_reduce(n, op=dist.ReduceOp.MIN)
        if int(n):
            self.gather(int(n))


def runs_ahead(engine: Any) -> bool:
    """Returns whether the host begins a step while the device still works on the one before.

    By default it does not: DeepSpeed's throughput timer waits for the device at both ends of a micro-step (utils/timer.py).
    """
    timer = getattr(getattr(engine, "tput_timer", None), "config", None)
    waits = getattr(timer, "enabled", True) and getattr(timer, "synchronized", True)
    return torch.device(engine.device).type != "cpu" and not waits


def skips_of(engine: Any) -> torch.Tensor | float:
    """Returns a number that grows where loss scaling skips an update.

    DeepSpeed counts its own skips. Under autocast to fp16 torch's scaler may skip one, too, which none counts: it halves its scale.
    """
    scaler, counted = autocast_scaler(engine), float(engine.skipped_steps)
    if scaler is None:
        return counted
    scale = scaler._get_scale_async()  # a device's is not waited for; None before the first backward pass
    return number_in(counted - scale.log2()) if scale is not None else counted - math.log2(scaler.get_scale())
