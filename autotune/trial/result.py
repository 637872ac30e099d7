"""Records of how a trial ended: report of a rank, exit of its processes, result of the trial."""

import hashlib
import math
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from pydantic import ConfigDict

from autotune.space.candidate import Candidate
from autotune.space.deepspeed import Scalar
from autotune.trial.device_load import BUSY_SHARE, DeviceLoad
from autotune.trial.groups import Groups

OOM_EXIT_CODE = 77
# If other processes keep more cores than this busy, step times are not the configuration's alone.
BUSY_CORES = 0.3
# Begin of the note of a trial beside which other processes ran.
MACHINE_BUSY = "the machine was busy"
# Begin of the note on files that a script writes, whose names differ from run to run.
WRITES_FILES = "the script itself writes files, as in every trial: "
# Stands for infinity and NaN, which a record cannot hold.
NOT_FINITE = sys.float_info.max
# Words of the caveat of trials that shared their host.
BESIDE = "ran on this host at the same time"
# Phases of a rank, in order; where ranks differ, the first tells most: of a script that has ended, that others still train.
PHASES = (
    "start", "import", "build", "other_process", "initialize", "first_evaluation", "script_ended", "warmup", "measure", "tail",
    "evaluate", "save", "done",
)  # fmt: skip
# The phases of the tail check, each with what does not fit if it runs out of memory.
TAIL_PHASES = {"tail": "the longest batch", "evaluate": "an evaluation step", "save": "saving a checkpoint"}


class Outcome(StrEnum):
    """How a trial ended. `LOST` is no result: the trial is run again."""

    COMPLETE = "complete"
    STOPPED_EARLY = "stopped_early"
    PREDICTED_OOM = "predicted_oom"
    OOM = "oom"
    DIVERGED = "diverged"
    NOT_APPLIED = "not_applied"
    TIMEOUT = "timeout"
    TOO_FEW_STEPS = "too_few_steps"
    CRASHED = "crashed"
    LOST = "lost"

    @property
    def words(self) -> str:
        """The outcome in words: `too few steps`."""
        return self.replace("_", " ")


# The outcomes of trials that told a step time, and of those that failed otherwise than by memory.
RAN = (Outcome.COMPLETE, Outcome.STOPPED_EARLY)
FAILURES = (Outcome.CRASHED, Outcome.TIMEOUT, Outcome.TOO_FEW_STEPS, Outcome.NOT_APPLIED, Outcome.DIVERGED)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation of a traced step.

    Attributes:
        calls: Calls per step.
        seconds: Its own time per step, without the operations that it calls.
    """

    name: str
    calls: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Traced:
    """Where the time of a rank's traced steps went; all times are seconds per step.

    Attributes:
        file: The trace, for Chrome or Perfetto.
        spans_s: From the beginning to the end of each phase, on the host.
        kinds_s: By phase: time in matrix `products`, in operations that move memory (`traffic`), in operations too
            `short` for their fixed cost, and with nothing but `messages` under way.
        messages_s: Time with messages between ranks under way.
        hidden_s: Part of that in which something was computed.
        operations: The operations that took most.
    """

    file: str
    n_steps: int
    spans_s: dict[str, float]
    kinds_s: dict[str, dict[str, float]]
    messages_s: float
    hidden_s: float
    operations: list[Operation] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Settings that really ran, read from the engine and the data, never from the request.

    Attributes:
        micro_batch_size: Leading dimension of the batch at the engine's forward; None if it varied; the mean of the
            samples where they are known to vary (`uneven`).
        loader_batch_size: Samples drawn from the data set per micro-batch; None without a data set.
        draw_size: Samples of the largest batch that the loader drew on this rank; 0 without a loader.
        parts: Micro-batches that the script makes of one such batch; 0 unless it cuts it up.
        draws: Samples that each of a script's loaders drew for a micro-batch, of those that fed more than one.
        gradient_accumulation_steps: Backward calls per optimizer step; None if it varied.
        samples_per_step: Samples per optimizer step, summed over ranks; where they vary the mean, of a trial the candidate's.
        tokens_per_step: Mean tokens of an optimizer step, summed over ranks, padding included; None where samples are
            not token sequences.
        dtype: Type of the model's weights.
        autocast: Type that `torch.autocast` computes in, if it is on.
        tf32: CUDA only: whether fp32 products used TensorFloat-32.
        unwitnessed: Settings that differ from the baseline's and that nothing in the engine shows.
        groups: Groups of ranks that share a copy of the model or a sequence; None where they were not looked at.
        uneven: Samples of the smallest and the largest micro-batch, where the target makes batches of varying sizes.
        rates: Learning rates of the first two steps, of all groups of parameters together.
        beside: Steps that optimizers of other models took in each of them.
    """

    micro_batch_size: int | None
    loader_batch_size: int | None
    gradient_accumulation_steps: int | None
    samples_per_step: int
    tokens_per_step: int | None
    zero_stage: int
    dtype: str
    autocast: str | None = None
    checkpointed_blocks: int = 0
    tf32: bool | None = None
    draw_size: int = 0
    parts: int = 0
    draws: tuple[int, ...] = ()
    unwitnessed: tuple[str, ...] = ()
    groups: Groups | None = None
    uneven: tuple[int, int] | None = None
    rates: tuple[float, ...] = ()
    beside: tuple[int, ...] = ()

    def mismatch(self, candidate: Candidate, data_parallel: int) -> str | None:
        """Returns the first setting that differs from the candidate's, in words; None if all were applied.

        Args:
            data_parallel: Ranks, or groups of them, that trained on different samples.
        """
        if self.groups is not None and (why := self.groups.mismatch(candidate)):
            return why
        dtypes = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
        expected = {
            "gradient_accumulation_steps": candidate.gradient_accumulation_steps,
            "zero_stage": candidate.zero_stage,
            "dtype": dtypes.get(candidate.precision, "float32"),
        }
        for name, value in expected.items():
            if getattr(self, name) != value:
                return f"{name}: {value} was asked for, {getattr(self, name)} ran"
        if candidate.precision.startswith("torch_autocast") and self.autocast is None:
            return "precision: torch_autocast was asked for, but it was off"
        if candidate.checkpoint_every > 0 and self.checkpointed_blocks == 0:
            return "checkpoint_every: no block was checkpointed"
        if candidate.checkpoint_every == 0 and self.checkpointed_blocks > 0:
            return f"checkpoint_every: none was asked for, {self.checkpointed_blocks} blocks were checkpointed"
        if self.uneven is not None:
            return None
        if candidate.micro_batch_size not in (self.micro_batch_size, self.loader_batch_size):
            ran = self.micro_batch_size or "a varying number"
            return f"micro_batch_size: {candidate.micro_batch_size} was asked for, {ran} ran"
        asked = candidate.micro_batch_size * candidate.gradient_accumulation_steps * data_parallel
        # The last part of a batch that is cut up may be smaller.
        n_cut = max(1, candidate.gradient_accumulation_steps // self.parts) * data_parallel if self.parts else 0
        left_over = n_cut * (candidate.micro_batch_size - 1)
        if not asked - left_over <= self.samples_per_step <= asked:
            return f"global batch: {asked} was asked for, {self.samples_per_step} ran"
        return None


@dataclass(frozen=True, kw_only=True)
class NoiseTerms:
    """Gradient sizes from which the noise scale is estimated, one entry per optimizer step.

    Attributes:
        micro_batch_size: Samples behind one micro-gradient.
        n_micro: Micro-gradients of a step: accumulation steps times ranks.
        micro_sq: Mean squared norm of the micro-gradients.
        mean_sq: Squared norm of their mean.
    """

    micro_batch_size: int
    n_micro: int
    micro_sq: list[float]
    mean_sq: list[float]


@dataclass(frozen=True, kw_only=True)
class GradientCheck:
    """Comparison of the first step's accumulated and reduced gradient with the mean of its micro-gradients.

    Attributes:
        error: Norm of the difference, taken in fp32, relative to the mean's; `NOT_FINITE` where it is not finite.
        norm: Norm of the gradient over the sampled elements, loss scaling undone; the same.
        n_micro: Micro-gradients in the mean.
    """

    error: float
    norm: float
    n_micro: int


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """Robust summary of the steps timed after warm-up.

    Attributes:
        median_s: Median step time; a step lasts as long as its slowest rank.
        ci95_s: Half-width of the median's 95 % confidence interval.
        n_steps: Steps the summary rests on.
        n_warmup: Steps cut off at the start.
    """

    median_s: float
    ci95_s: float
    n_steps: int
    n_warmup: int

    @property
    def relative_ci(self) -> float:
        """Half-width of the confidence interval relative to the median."""
        return self.ci95_s / self.median_s if self.median_s > 0 else math.inf


@dataclass(kw_only=True)
class Measurements:
    """Fields that the report of a rank and the result of a trial have in common.

    Attributes:
        reason: Why, in one line, where the outcome is not `complete`.
        phase: Last phase that was entered, of `PHASES`.
        startup_s: Seconds before the first step, by phase; of a trial the slowest rank's.
        step_times_s: Wall time of each optimizer step of the slowest rank, warm-up included.
        losses: Mean loss over ranks of each step; None where it was not finite.
        loss_dtype: Type with 16 bits in which the target computes its loss; empty for another.
        taken_in: What each step took in, summed over ranks, by name: `samples`, `tokens`, `real_tokens` (without
            padding), and `elements` of all tensors that went forward. A trial's result keeps one number where all
            steps are alike, and nothing where it is not known.
        phase_times_s: Parts of one step: data, forward, backward, step; within backward what is recomputed (`recompute`);
            with several ranks also collectives in forward and backward (`reduce`) and in the optimizer's step (`gather`),
            and waiting for other ranks before them (`wait`).
        micro_step_s: Median time of a micro-step that ends an optimizer step (`boundary`) and of one that does not
            (`inner`); of a trial the slowest rank's.
        alloc_retries: CUDA only: how often the allocator freed its cache and retried; of a trial summed over ranks.
        other_cores: Cores that other processes kept busy while steps were timed.
        log_slowdown: Logarithm of how much longer steps took for that, as `shared_cores` estimates it; None in an earlier version's record.
        device_load: The device, where NVIDIA's management library is there; of a trial all ranks' devices.
        side_changes: Changes to a training script besides the DeepSpeed JSON.
        unreproducible: Those side changes that no flag, constant or line of the user's can make.
        flags: Flags that carried a candidate field (or `ds_config`), by all their names.
        tail: The worst micro-batch, where it was trained on: its `samples`, their `length`, its `elements`.
        expected: What a step takes in on average over the whole data set, by the names in `taken_in`; empty where
            padding does not follow from the lengths.
        noise: Gradient sizes, if requested.
        gradient: Accuracy of the first step's gradient, if requested.
    """

    outcome: Outcome
    reason: str = ""
    phase: str = ""
    startup_s: dict[str, float] = field(default_factory=dict)
    step_times_s: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    loss_dtype: str = ""
    taken_in: dict[str, list[int]] = field(default_factory=dict)
    phase_times_s: dict[str, float] = field(default_factory=dict)
    micro_step_s: dict[str, float] = field(default_factory=dict)
    alloc_retries: int | None = None
    other_cores: float = 0.0
    log_slowdown: float | None = None
    device_load: DeviceLoad | None = None
    observed: Observed | None = None
    caveats: list[str] = field(default_factory=list)
    side_changes: list[str] = field(default_factory=list)
    unreproducible: list[str] = field(default_factory=list)
    flags: dict[str, list[str]] = field(default_factory=dict)
    tail: dict[str, int] = field(default_factory=dict)
    expected: dict[str, float] = field(default_factory=dict)
    noise: NoiseTerms | None = None
    gradient: GradientCheck | None = None

    @property
    def padding(self) -> float | None:
        """Share of the tokens that were padding; None where samples are no sequences."""
        tokens, real = (self.taken_in.get(name) or () for name in ("tokens", "real_tokens"))
        return max(0.0, 1 - (sum(real) / len(real)) / (sum(tokens) / len(tokens))) if real and any(tokens) else None

    @property
    def disturbed(self) -> str:
        """What other processes took, in words; empty if little: of the device on CUDA, of the cores on a CPU."""
        if self.device_load is not None and self.device_load.used_by_others is not None:
            share = self.device_load.used_by_others
            return f"other processes kept the device busy {share:.0%} of the time" if share > BUSY_SHARE else ""
        on_cuda = self.alloc_retries is not None
        busy = self.other_cores > BUSY_CORES and not on_cuda
        return f"other processes used {self.other_cores:.1f} cores" if busy else ""


@dataclass(kw_only=True)
class RankReport(Measurements):
    """Report of one rank, filled in while the rank runs, so that a crash leaves how far it came.

    Attributes:
        failed_at: Unix time of the failure; tells the first failure from those it caused.
        cpu_times_s: Process time of this rank, all threads, of each step.
        peak_memory_bytes: Peak by phase: on CPU growth of the resident set since the start, on CUDA allocated bytes.
        reserved_memory_bytes: CUDA only: peak of the caching allocator.
        traced: Summary of the trace, if requested.
        machine: Device, driver and libraries.
    """

    # Only a file that no rank wrote holds such numbers; it is refused as a whole.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(allow_inf_nan=False)

    rank: int
    outcome: Outcome = Outcome.CRASHED
    phase: str = "start"
    failed_at: float | None = None
    cpu_times_s: list[float] = field(default_factory=list)
    peak_memory_bytes: dict[str, int] = field(default_factory=dict)
    reserved_memory_bytes: int | None = None
    traced: Traced | None = None
    host: str = ""
    machine: str = ""


@dataclass(kw_only=True)
class TrialResult(Measurements):
    """Result of one trial, merged from the reports of its ranks.

    Attributes:
        failed_rank: The rank that failed first.
        candidate: The configuration, as flat knob values.
        cpu_s_per_step: Median process time of a timed step, summed over ranks.
        samples_per_step: Observed samples per optimizer step.
        tokens_per_step: Observed tokens per optimizer step.
        peak_memory_bytes: Peak over phases and ranks; on CUDA the reserved bytes.
        memory_by_phase_bytes: Peak by phase, highest over ranks.
        reserved_memory_bytes: CUDA only: peak of the caching allocator, highest over ranks.
        waited_s: Time from submission to the start of its ranks: the engine's queue.
        lost_attempts: Why earlier attempts were lost: the engine took the machines away, or an agent died.
        machine: Device, driver and libraries of its ranks.
    """

    failed_rank: int | None = None
    candidate: dict[str, Scalar] = field(default_factory=dict)
    world_size: int = 1
    steps: StepStats | None = None
    cpu_s_per_step: float | None = None
    samples_per_step: int | None = None
    tokens_per_step: int | None = None
    peak_memory_bytes: int | None = None
    memory_by_phase_bytes: dict[str, int] = field(default_factory=dict)
    reserved_memory_bytes: int | None = None
    wall_s: float = 0.0
    waited_s: float = 0.0
    lost_attempts: list[str] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    machine: str = ""

    @property
    def end(self) -> str:
        """How it ended, with the reason: `too few steps: the script ended after 3`."""
        return f"{self.outcome.words}: {self.reason}"

    @property
    def failed_check(self) -> bool:
        """Whether the trial was measured, and failed in its tail check."""
        return self.phase in TAIL_PHASES and self.outcome in (Outcome.OOM, Outcome.CRASHED)

    @property
    def place(self) -> str:
        """Name of what it ran on, for a file: of its machines, devices, driver and libraries; empty if unknown."""
        return hashlib.sha256(repr((self.hosts, self.machine)).encode()).hexdigest()[:12] if self.machine else ""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How the processes of a trial ended, as the agent that started them saw it.

    Attributes:
        codes: Exit status of each rank, negative for a signal.
        first_failed: The rank that ended badly first.
        failed_at: Unix time of that failure, or of the kill if nothing had failed before.
        killed: Why the agent killed the ranks: `deadline`, `cancel`, `peer` (one rank had failed), `processes` (too
            many); `lost` if the agent itself failed; None if it killed nothing.
        note: Message of the engine or the agent about the end.
        kernel_oom: The kernel's out-of-memory killer struck during the trial.
        wall_s: Seconds from the start of the ranks to the end of the last one.
        swept: What the trial left behind and the agent removed.
    """

    codes: dict[int, int]
    first_failed: int | None = None
    failed_at: float | None = None
    killed: str | None = None
    note: str = ""
    kernel_oom: bool = False
    wall_s: float = 0.0
    swept: list[str] = field(default_factory=list)
