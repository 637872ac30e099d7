"""The contract between the driver and the ranks: what is asked, what came back, and the files that carry both."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import ConfigDict, TypeAdapter

from autotune import files, stats
from autotune.candidate import AUTOCAST, Candidate, DsConfig, Scalar
from autotune.convergence import NoiseTerms
from autotune.gate import GradientCheck
from autotune.predictors.profile import Machine, Profile
from autotune.stats import StepStats

OOM_EXIT_CODE = 77
# What a process takes of a device outside torch's allocator: CUDA's context, its modules and libraries.
CUDA_CONTEXT_BYTES = 600 << 20
# With this much of the machine in other hands, a step time is no longer the configuration's own.
BUSY_CORES = 0.3
# Families of scripts, in words, that others than the worker look at.
TRAINER, ACCELERATE = "transformers' Trainer", "Accelerate"
# A report holds some numbers for each step; what is larger is none. Of an event stream the end says how far a rank came.
LARGEST_REPORT_BYTES, EVENTS_TAIL_BYTES = 64 << 20, 4 << 20
# What a rank goes through, in order.
PHASES = ("start", "import", "build", "initialize", "warmup", "measure", "done")
T = TypeVar("T")


class Outcome(StrEnum):
    """How a trial ended; all but `LOST` are results, and only `LOST` is retried."""

    COMPLETE = "complete"
    STOPPED_EARLY = "stopped_early"
    ILLEGAL = "illegal"
    PREDICTED_OOM = "predicted_oom"
    OOM = "oom"
    DIVERGED = "diverged"
    NOT_APPLIED = "not_applied"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    LOST = "lost"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The machine and the libraries that a measurement belongs to.

    Attributes:
        accelerator: DeepSpeed's name of the device: `cpu`, `cuda`.
        device_name: Model of the device.
        n_devices: Devices on this machine.
        device_memory_bytes: Memory of one device (of the whole machine on CPU).
        bf16: Whether the device computes in bfloat16.
        fp16: Whether DeepSpeed trains in fp16 on it.
        n_cores: Processor cores that this process may use.
        omp_num_threads: The user's own `OMP_NUM_THREADS`, if set.
        versions: Version of each library that a measurement depends on.
    """

    accelerator: str
    device_name: str
    n_devices: int
    device_memory_bytes: int
    bf16: bool
    fp16: bool
    n_cores: int
    versions: dict[str, str]
    omp_num_threads: str | None = None

    def share_bytes(self, ranks: int) -> float:
        """What a rank may use: its device's memory but for what CUDA itself takes; on a CPU its share of the machine's."""
        return (
            max(0.0, self.device_memory_bytes - CUDA_CONTEXT_BYTES)
            if self.accelerator == "cuda"
            else self.device_memory_bytes / ranks
        )


def threads_per_rank(n_cores: int, world_size: int, omp_num_threads: str | None) -> int:
    """Threads that a rank computes with on CPU: the user's `OMP_NUM_THREADS`, else its share of the cores."""
    if omp_num_threads and omp_num_threads.isdigit() and int(omp_num_threads) > 0:
        return int(omp_num_threads)
    return max(1, n_cores // world_size)


def module_constants(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.Assign | ast.AnnAssign]]:
    """The names to which a script's text assigns a value at its top level, as `--set` may replace it, and where."""
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
                yield name, node
            case ast.If() | ast.With() | ast.Try():
                yield from module_constants([*node.body, *getattr(node, "orelse", [])])


def driver_version() -> str:
    """Version of NVIDIA's kernel driver; empty where there is none."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"Kernel Module\D*([0-9][0-9.]+)", text)
    return found[1] if found else ""


@dataclass(frozen=True, kw_only=True)
class DataShape:
    """What samples look like, as far as step time and memory depend on it.

    Attributes:
        fields: Each tensor of a sample: name, type and shape, with `*` where a size differs between samples.
        lengths: Share of the samples whose largest dimension is at most so much, by upper edge; two classes to a doubling.
        n_seen: Samples looked at.
    """

    fields: tuple[str, ...]
    lengths: dict[str, float]
    n_seen: int


@dataclass(frozen=True, kw_only=True)
class Script:
    """How a training script is run.

    Attributes:
        arguments: Its command line, templates filled in, but for `{ds_config}` (this trial's file) and `{local_rank}`.
        working_dir: Folder that it runs in.
        module: Its name, where it is started as `python -m NAME`.
        environment: Variables that it is given, with the same templates.
        assignments: Module constants to replace, and by what.
        micro_batch_size: What the untouched script runs with, so that what carries it is known by its value; 0 in a probe.
        gradient_accumulation_steps: The same.
        precision: The same.
        checkpoint_every: The same, as far as it recomputes activations itself.
        learning_rates: The same, of each of the optimizer's groups.
        carried: The candidate fields that the user's own templates and mappings carry, so that nothing else is to.
        side_changes: What they carry, in words, where it is not what the untouched script does.
    """

    arguments: tuple[str, ...] = ()
    working_dir: str = "."
    module: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    assignments: dict[str, str] = field(default_factory=dict)
    micro_batch_size: int = 0
    gradient_accumulation_steps: int = 0
    precision: str = ""
    checkpoint_every: int = 0
    learning_rates: tuple[float | None, ...] = ()
    carried: tuple[str, ...] = ()
    side_changes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Probed:
    """What one run of the untouched script showed.

    Attributes:
        ds_config: The DeepSpeed configuration that it gave to `deepspeed.initialize`.
        micro_batch_size: Samples at the engine's forward; None if it varied.
        gradient_accumulation_steps: Backward calls per optimizer step; None if it varied.
        family: What kind of script it is, in words: the framework above DeepSpeed.
        checkpoint_every: Which blocks' activations it recomputes itself, as in a candidate.
        plain_backward: It calls `loss.backward()`, not `engine.backward(loss)`.
        movable: The candidate fields that a second run, with all of them changed, saw changed.
        moved_by: What carried the change, as that run noted it.
        flags: The flag that carries a candidate field (or `ds_config`), by all its names.
        config_source: Where the configuration comes from: the path of a file, or empty for a dict in the code.
        configured_accumulation: The engine's own number of micro-batches; None if it was not read.
        model_parallel_size: Ranks that train one copy of the model together; the others have data of their own.
        pipeline_stages: Stages of a `PipelineModule`; 0 for another model.
        expert_parallel: Ranks have experts of their own, as DeepSpeed's mixtures do.
        learning_rates: What each of the optimizer's groups starts from; None where one finds its own.
    """

    ds_config: DsConfig
    micro_batch_size: int | None
    gradient_accumulation_steps: int | None
    family: str = "raw DeepSpeed"
    checkpoint_every: int = 0
    plain_backward: bool = False
    movable: tuple[str, ...] = ()
    moved_by: tuple[str, ...] = ()
    configured_accumulation: int | None = None
    model_parallel_size: int = 1
    pipeline_stages: int = 0
    expert_parallel: bool = False
    learning_rates: tuple[float | None, ...] = ()
    flags: dict[str, list[str]] = field(default_factory=dict)
    config_source: str = ""

    def completed(self, config: DsConfig, candidate: Candidate) -> DsConfig:
        """A candidate's DeepSpeed configuration as this script needs it."""
        config = dict(config)
        if self.configured_accumulation not in (None, self.gradient_accumulation_steps):
            # The script counts micro-batches itself; told of them, DeepSpeed would count them once more.
            config["gradient_accumulation_steps"] = self.configured_accumulation
        if self.pipeline_stages:
            section = {**config.get("pipeline", {}), "activation_checkpoint_interval": candidate.checkpoint_every}
            if candidate.checkpoint_every and not self.checkpoint_every:
                # Reentrant, DeepSpeed's default, gives no gradient to a first layer that is fed tokens.
                section["use_reentrant"] = False
            config["pipeline"] = section
            if section == {"activation_checkpoint_interval": 0}:
                del config["pipeline"]
        return config


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What the user's target is, as one rank found it.

    Attributes:
        n_parameters: Parameters of the model, tied ones once.
        n_trainable: Of these, the trainable ones.
        n_samples: Samples in the data set; None for `batch(n)` and endless data.
        n_blocks: Repeated blocks that activation checkpointing can wrap.
        block_class: Class of these blocks.
        block_share: Their share of the parameters.
        float_buffers: The model has buffers of floating-point numbers, as batch normalisation does.
        client_optimizer: The target defines `optimizer`.
        optimizer: Class of that optimizer, where it could be made without data.
        environment: Where this was found.
        caveats: What the user should know about the target.
        script: What a probe found, where the target is a training script.
        profile: What memory and time follow from; None where it was not profiled.
        machine: What the machine does in a second, so many ranks at once; None where that was not measured.
        structure: Digest of the model's modules and parameters; empty where it was not taken.
        data: What the samples look like; None where none could be drawn.
    """

    n_parameters: int
    n_trainable: int
    n_samples: int | None
    n_blocks: int
    block_class: str
    block_share: float
    float_buffers: bool
    client_optimizer: bool
    environment: Environment
    optimizer: str = ""
    caveats: list[str] = field(default_factory=list)
    script: Probed | None = None
    profile: Profile | None = None
    machine: Machine | None = None
    structure: str = ""
    data: DataShape | None = None

    def data_parallel(self, world_size: int) -> int:
        """How many of the ranks have data of their own."""
        return world_size // (self.script.model_parallel_size if self.script else 1)


# After so many timed steps, and so many seconds of them, a trial may be stopped where its fastest step is slower by this factor than its
# rival allows: the first steps read high (over 206 trials of two studies, 95 % of them below 1.43, 1.15 and 1.04 of the median).
RIVAL_FACTOR, RIVAL_S = {1: 1.6, 2: 1.2, 3: 1.0}, 0.3


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A measured configuration, and what a trial must still be able to undercut not to be worse than it on every objective.

    Attributes:
        trial: Its number.
        step_time_s: The trial's step time from which on all objectives that follow from time are worse.
        peak_memory_bytes: The same for its memory; None if memory is no objective.
    """

    trial: int
    step_time_s: float
    peak_memory_bytes: float | None = None

    def beats(self, step_time_s: float, peak_memory_bytes: float) -> bool:
        """Whether a trial that can do no better than this is beaten."""
        return step_time_s >= self.step_time_s and (
            self.peak_memory_bytes is None or peak_memory_bytes >= self.peak_memory_bytes
        )


def beaten_by(rivals: Sequence[Rival], times_s: Sequence[float], peak_memory_bytes: float) -> Rival | None:
    """The rival that a trial cannot match any more; None while there is hope, or too little was timed.

    Args:
        rivals: Whom it is compared with.
        times_s: Every optimizer step so far, set-up included; the fastest but the first bounds the step time from below.
        peak_memory_bytes: Its peak so far, which can only grow.
    """
    timed = times_s[stats.SETUP_STEPS :]
    if not timed or sum(timed) < RIVAL_S:
        return None
    # The second step of the set-up is slower for being taken apart, but guards against a hiccup in the only other one.
    fastest = min(times_s[1:]) / RIVAL_FACTOR[min(len(timed), max(RIVAL_FACTOR))]
    return next((rival for rival in rivals if rival.beats(fastest, peak_memory_bytes)), None)


@dataclass(frozen=True, kw_only=True)
class TrialRequest:
    """What the ranks of one trial are to do.

    Attributes:
        target: Path of the user's `model.py` or training script.
        mode: `measure` runs a trial; `inspect` only loads the target and writes a `Workload`; `probe` runs a script untouched
            for a few steps and does the same; `profile` follows a pass of a `model.py` and writes a `Profile`, `rates` measures
            the machine and writes a `Machine` (both in `predict.profile`), `machine` does so at length and writes a `Probe`
            (`predict.links`), where a target only stands for its data; `build` compiles `ops`.
        candidate: The configuration under trial (none for `inspect`).
        ds_config: What `deepspeed.initialize` is given.
        world_size: Ranks.
        nodes: Machines that the ranks are spread over, the same number on each.
        seed: Seed of weights and data order, the same for all trials of a study.
        budget_s: Training time after which the measurement ends, warm-up included.
        max_steps: Optimizer steps after which it ends at the latest.
        min_samples: Samples to train on at least, so that loss curves of different batches overlap (budget permitting).
        deadline_s: Wall time after which the ranks are killed, counted from their start.
        device_memory_bytes: Stated memory limit of a device; None means what the device has.
        script: How to run the target, where it is a training script.
        noise: Measure the size of gradients too, for the noise scale; the hooks cost time, so the step times are not a
            configuration's own.
        check_gradient: Compare the first step's gradient with the micro-gradients that it is made of.
        replicate: Above 0: not the run of the study's seed but one as good: weights rounded otherwise, other dropout.
        weights: Start from these, a file or folder, in place of the weights that `model()` makes.
        save_weights: Write the weights that the trial ends with to this file.
        first_sample: Start at this place of the data's order.
        learning_rate_factor: What the learning rates of an optimizer that the target makes are multiplied by.
        rivals: The trial ends as soon as it is seen to be worse than one of these on every objective.
        ops: DeepSpeed's operations to compile, by builder name.
        traced_steps: Steps to run under torch's profiler once the step time is known, after some that are taken apart.
    """

    target: str
    mode: str = "measure"
    candidate: dict[str, Scalar] = field(default_factory=dict)
    ds_config: DsConfig = field(default_factory=dict)
    world_size: int = 1
    nodes: int = 1
    seed: int = 0
    budget_s: float = 10.0
    max_steps: int = 1000
    min_samples: int = 0
    deadline_s: float = 300.0
    device_memory_bytes: int | None = None
    script: Script | None = None
    noise: bool = False
    check_gradient: bool = False
    replicate: int = 0
    weights: str | None = None
    save_weights: str | None = None
    first_sample: int = 0
    learning_rate_factor: float = 1.0
    rivals: tuple[Rival, ...] = ()
    traced_steps: int = 0
    ops: tuple[str, ...] = ()

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each machine."""
        return self.world_size // self.nodes


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation of a traced step.

    Attributes:
        name: As torch names it.
        calls: How often it ran in a step.
        seconds: What it took itself, in a step.
    """

    name: str
    calls: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Traced:
    """What the traced steps of a rank were spent on; seconds are those of a step.

    Attributes:
        file: The trace, which Chrome and Perfetto show.
        n_steps: Steps that were traced.
        spans_s: From the beginning to the end of each phase, on the host.
        kinds_s: By phase, what `products` of matrices and other operations, which move memory (`traffic`), took themselves, what
            operations took that are too `short` to be worth their fixed cost, and how long there were only `messages`.
        messages_s: While messages between ranks were under way.
        hidden_s: Of that, while something else was computed.
        operations: The ones that took most.
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
    """What really ran, read from the engine and the data, never from the request.

    Attributes:
        micro_batch_size: Leading dimension of the batch at the engine's forward; None if it varied.
        loader_batch_size: Samples drawn from the data set per micro-batch; None without a data set.
        gradient_accumulation_steps: Backward calls per optimizer step; None if it varied.
        samples_per_step: Samples per optimizer step, summed over ranks.
        tokens_per_step: Tokens per optimizer step, summed over ranks; None where samples are not token sequences.
        zero_stage: Stage that the engine runs.
        dtype: Type of the model's weights.
        autocast: Type that `torch.autocast` computes in, if it is on.
        checkpointed_blocks: Blocks whose activations were recomputed.
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

    def mismatch(self, candidate: Candidate, world_size: int) -> str | None:
        """What ran otherwise than the candidate says; None if all of it was applied."""
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
        if candidate.micro_batch_size not in (self.micro_batch_size, self.loader_batch_size):
            return f"micro_batch_size: {candidate.micro_batch_size} was asked for, {self.micro_batch_size or 'a varying number'} ran"
        if self.samples_per_step != candidate.global_batch_size(world_size):
            return f"global batch: {candidate.global_batch_size(world_size)} was asked for, {self.samples_per_step} ran"
        return None


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank wrote before it left.

    Attributes:
        rank: Its number.
        outcome: How the trial ended as this rank saw it.
        phase: The last phase it entered: import, build, initialize, warmup, measure, done.
        reason: What went wrong, in one line.
        failed_at: Unix time of the failure, to tell the first from its echoes.
        startup_s: Seconds from the start of the rank to its first step, by phase.
        step_times_s: Wall time of each optimizer step, warm-up included, each the slowest rank's.
        cpu_times_s: Process time (all threads) of this rank for the same steps.
        losses: Mean loss over ranks for each step; None where it was not finite.
        phase_times_s: One step taken apart: data, forward, backward, step, and of backward what our own checkpointing recomputes
            (`recompute`); with several ranks also what collectives took in forward and backward (`reduce`) and in the optimizer's
            step (`gather`), and waiting for the others before them (`wait`).
        micro_step_s: Median time of a micro-step that ends no optimizer step (`inner`) and of one that does (`boundary`).
        peak_memory_bytes: High-water mark by phase: on CPU resident growth over the rank's start, on CUDA allocated.
        reserved_memory_bytes: CUDA only: high-water mark of the caching allocator.
        alloc_retries: CUDA only: how often the allocator had to free its cache and try again.
        other_cores: Cores that other processes kept busy while steps were timed.
        observed: What really ran.
        caveats: What the user should know about this trial.
        side_changes: What a training script needed besides the DeepSpeed JSON.
        noise: Gradient sizes, where the request asks for them.
        gradient: How true the first step's gradient is, where the request asks for it.
        unreproducible: Those of them that only a trial can make: no flag, constant or line of the user's does.
        flags: The flags that carried a candidate field (or `ds_config`), by all their names.
        traced: What a trace showed, where one was asked for.
    """

    # A rank writes no such numbers; in whatever else may stand there, they are refused with the rest.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(allow_inf_nan=False)

    rank: int
    outcome: Outcome
    phase: str
    reason: str = ""
    failed_at: float | None = None
    startup_s: dict[str, float] = field(default_factory=dict)
    step_times_s: list[float] = field(default_factory=list)
    cpu_times_s: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    phase_times_s: dict[str, float] = field(default_factory=dict)
    micro_step_s: dict[str, float] = field(default_factory=dict)
    peak_memory_bytes: dict[str, int] = field(default_factory=dict)
    reserved_memory_bytes: int | None = None
    alloc_retries: int | None = None
    other_cores: float = 0.0
    observed: Observed | None = None
    caveats: list[str] = field(default_factory=list)
    side_changes: list[str] = field(default_factory=list)
    noise: NoiseTerms | None = None
    gradient: GradientCheck | None = None
    unreproducible: list[str] = field(default_factory=list)
    flags: dict[str, list[str]] = field(default_factory=dict)
    traced: Traced | None = None


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How the processes of a trial ended, as the agent that started them saw it.

    Attributes:
        codes: Exit status of each rank, negative for a signal.
        first_failed: The rank that ended badly first.
        failed_at: Unix time of that, or of the kill where nothing had failed before it.
        killed: Why the agent killed the rest: `deadline`, `cancel`, `peer` (one rank had failed), `processes` (there were too
            many); `lost` where the agent itself came to grief; None if it did not.
        note: What the engine or the agent has to say of it.
        kernel_oom: The kernel's out-of-memory killer struck during the trial.
        wall_s: From the start of the ranks to the last one's end.
        swept: What the trial had left behind and the agent removed.
    """

    codes: dict[int, int]
    first_failed: int | None = None
    failed_at: float | None = None
    killed: str | None = None
    note: str = ""
    kernel_oom: bool = False
    wall_s: float = 0.0
    swept: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """A trial's end, as data.

    Attributes:
        outcome: How it ended.
        reason: Why, in one line, where it is not `complete`.
        phase: The phase in which it ended.
        failed_rank: The rank that failed first.
        candidate: The configuration, as flat knob values.
        world_size: Ranks.
        steps: Summary of the timed steps.
        step_times_s: Every step, warm-up included.
        cpu_s_per_step: Median process time of a timed step, summed over ranks.
        losses: Mean loss over ranks for each step.
        samples_per_step: Observed samples per optimizer step.
        tokens_per_step: Observed tokens per optimizer step.
        peak_memory_bytes: Highest over phases and ranks; on CUDA the reserved bytes.
        memory_by_phase_bytes: The same by phase, highest over ranks.
        phase_times_s: One step taken apart, slowest rank.
        micro_step_s: Median time of an `inner` and of a `boundary` micro-step, slowest rank.
        alloc_retries: CUDA allocator retries, summed over ranks.
        other_cores: Cores that other processes kept busy while steps were timed.
        startup_s: Seconds before the first step, slowest rank, by phase.
        wall_s: Wall time of the whole trial.
        observed: What really ran.
        caveats: What the user should know about this trial.
        side_changes: What a training script needed besides the DeepSpeed JSON.
        noise: Gradient sizes, where the request asks for them.
        gradient: How true the first step's gradient is, where the request asks for it.
        unreproducible: Those of them that only a trial can make: no flag, constant or line of the user's does.
        flags: The flags that carried a candidate field (or `ds_config`), by all their names.
    """

    outcome: Outcome
    reason: str = ""
    phase: str = ""
    failed_rank: int | None = None
    candidate: dict[str, Scalar] = field(default_factory=dict)
    world_size: int = 1
    steps: StepStats | None = None
    step_times_s: list[float] = field(default_factory=list)
    cpu_s_per_step: float | None = None
    losses: list[float | None] = field(default_factory=list)
    samples_per_step: int | None = None
    tokens_per_step: int | None = None
    peak_memory_bytes: int | None = None
    memory_by_phase_bytes: dict[str, int] = field(default_factory=dict)
    phase_times_s: dict[str, float] = field(default_factory=dict)
    micro_step_s: dict[str, float] = field(default_factory=dict)
    alloc_retries: int | None = None
    other_cores: float = 0.0
    startup_s: dict[str, float] = field(default_factory=dict)
    wall_s: float = 0.0
    observed: Observed | None = None
    caveats: list[str] = field(default_factory=list)
    side_changes: list[str] = field(default_factory=list)
    noise: NoiseTerms | None = None
    gradient: GradientCheck | None = None
    unreproducible: list[str] = field(default_factory=list)
    flags: dict[str, list[str]] = field(default_factory=dict)


class TrialDir:
    """The files of one trial: `request.json`, `ds_config.json`, per rank a report and a log, `exit.json`, `result.json`.

    On several machines each has a `node-N.json` (who it is, from when on it runs the trial) and an `exit-N.json`, and the first one's
    `master.json` says where the ranks meet. `job.json` names the engine's job, `cancel` asks the agents to stop. `scratch` takes what
    a training script writes; it is removed when the trial has ended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.request = path / "request.json"
        self.ds_config = path / "ds_config.json"
        self.exit = path / "exit.json"
        self.result = path / "result.json"
        self.workload = path / "workload.json"
        self.profile = path / "profile.json"
        self.machine = path / "machine.json"
        self.probe = path / "probe.json"
        self.events = path / "events.jsonl"
        self.scratch = path / "scratch"
        self.master = path / "master.json"
        self.cancel = path / "cancel"
        self.job = path / "job.json"

    def report(self, rank: int) -> Path:
        """Where rank `rank` writes its report."""
        return self.path / f"rank-{rank}.json"

    def log(self, rank: int) -> Path:
        """Where standard output and error of rank `rank` go."""
        return self.path / f"rank-{rank}.log"

    def events_of(self, node: int) -> Path:
        """Where the ranks of a machine tell what they do: on a network file system only those of one machine can append to a file."""
        return self.path / f"events-{node}.jsonl" if node else self.events

    def node(self, node: int) -> Path:
        """Where the agent of a machine says that it has taken the trial up."""
        return self.path / f"node-{node}.json"

    def node_exit(self, node: int, nodes: int) -> Path:
        """Where the agent of a machine writes how its ranks ended."""
        return self.path / f"exit-{node}.json" if nodes > 1 else self.exit

    def names(self) -> set[str]:
        """What lies in the folder. Listing it shows on NFS what others wrote just now; asking for a file by name may not."""
        try:
            return set(os.listdir(self.path))
        except FileNotFoundError:
            return set()


def write(path: Path, value: Any, *, sync: bool = True, private: bool = False) -> None:
    """Writes a dataclass or plain data as JSON, whole or not at all; see `files.write_bytes`."""
    data = _adapter(type(value)).dump_python(value, mode="json") if hasattr(value, "__dataclass_fields__") else value
    files.write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n", sync=sync, private=private)


def read(path: Path, kind: type[T]) -> T:
    """Reads a dataclass back from JSON.

    Raises:
        FileNotFoundError: There is no such file.
        pydantic.ValidationError: The file is not of that kind.
    """
    found: T = _adapter(kind).validate_json(path.read_bytes())
    return found


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:  # making one takes milliseconds, and a trial reads and writes nine such files
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}


def result_in(path: Path) -> TrialResult | None:
    """The result of the trial in a folder, if it has one that can be read."""
    try:
        return read(TrialDir(path).result, TrialResult)
    except (FileNotFoundError, ValueError):
        return None


def ends(trial_dir: TrialDir, nodes: int) -> dict[int, Exit]:
    """How the trial ended on each machine whose agent has said so."""
    names, found = trial_dir.names(), {}
    for node in range(nodes):
        path = trial_dir.node_exit(node, nodes)
        if path.name in names:
            with contextlib.suppress(FileNotFoundError, ValueError):
                found[node] = read(path, Exit)
    return found


def joined(found: Mapping[int, Exit], nodes: int, note: str = "") -> Exit:
    """One end from those of all machines; lost where one of them has left no word.

    Args:
        found: The ends by machine.
        nodes: Machines in all.
        note: What the engine says of it.
    """
    missing = [node for node in range(nodes) if node not in found]
    # What one machine saw fail first is the cause; on the others it is a peer's failure.
    first = min(
        (end for end in found.values() if end.failed_at is not None), key=lambda end: end.failed_at or 0.0, default=None
    )
    whys = {end.killed for end in found.values()} | ({"lost"} if missing else set())
    silent = f"machine {missing[0]} of {nodes} left no word" if missing else ""
    return Exit(
        codes={rank: code for end in found.values() for rank, code in end.codes.items()},
        first_failed=first.first_failed if first else None,
        failed_at=first.failed_at if first else None,
        killed=next((why for why in ("lost", "cancel", "processes", "deadline", "peer") if why in whys), None),
        note=note or next((end.note for end in found.values() if end.note), silent),
        kernel_oom=any(end.kernel_oom for end in found.values()),
        wall_s=max((end.wall_s for end in found.values()), default=0.0),
        swept=sorted({line for end in found.values() for line in end.swept}),
    )


def reports(trial_dir: TrialDir, world_size: int) -> dict[int, RankReport]:
    """The reports that the ranks managed to write; whatever else may lie in their place is none."""
    found = {}
    for rank in range(world_size):
        with contextlib.suppress(ValueError):
            report: RankReport = _adapter(RankReport).validate_json(
                files.tail(trial_dir.report(rank), LARGEST_REPORT_BYTES, whole=True) or b""
            )
            if report.rank == rank:
                found[rank] = report
    return found


# What a rank says when another one died: gloo, NCCL and the store each have their words.
ECHOES = (
    "closed by peer",
    "reset by peer",
    "connection refused",
    "broken pipe",
    "remote process exited",
    "nccl communicator was aborted",
    "socket timeout",
    "failed to recv",
    "diststoreerror",
    "distnetworkerror",
    "distbackenderror",
)


# What torch says where 16-bit weights meet numbers of another type, or an operation that has no 16-bit version.
DTYPE_MISMATCHES = (
    "expected scalar type",
    "expected both tensors to have",
    "same dtype",
    "same data type",
    "and bias type",
    "and weight type",
    "not implemented for 'bfloat16'",
    "not implemented for 'half'",
    "low precision dtypes not supported",
)


def is_dtype_mismatch(result: TrialResult) -> bool:
    """Whether a trial with 16-bit weights ended because something in the model is of another type."""
    mixed = any(words in result.reason.lower() for words in DTYPE_MISMATCHES)
    return mixed and result.outcome is Outcome.CRASHED and result.candidate.get("precision") in AUTOCAST


def phases(trial_dir: TrialDir) -> dict[int, str]:
    """The last phase that each rank entered, from the event streams: a killed rank leaves no report."""
    last: dict[int, str] = {}
    lines: list[str] = []
    for path in sorted(trial_dir.path.glob("events*.jsonl")):
        lines += (files.tail(path, EVENTS_TAIL_BYTES) or b"").decode(errors="replace").splitlines()
    for line in lines:
        try:
            event = json.loads(line)
            if "phase" in event:
                last[int(event["rank"])] = str(event["phase"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue  # cut short by a kill, or not ours
    return last


def merge(
    request: TrialRequest, found: Mapping[int, RankReport], end: Exit, entered: Mapping[int, str] | None = None
) -> TrialResult:
    """One result from the ranks' reports and the way their processes ended.

    Args:
        request: What was asked for.
        found: The reports by rank.
        end: How the processes ended.
        entered: The last phase of each rank, for those without a report.
    """
    outcome, reason, phase, rank = _verdict(request, found, end, _first_phase(found, entered or {}, end))
    by_phase = _highest(report.peak_memory_bytes for report in found.values())
    peaks = [
        *by_phase.values(),
        *(report.reserved_memory_bytes for report in found.values() if report.reserved_memory_bytes),
    ]
    result = TrialResult(
        outcome=outcome,
        reason=reason,
        phase=phase,
        failed_rank=rank,
        candidate=request.candidate,
        world_size=request.world_size,
        wall_s=end.wall_s,
        startup_s=_highest(report.startup_s for report in found.values()),
        peak_memory_bytes=max(peaks) if peaks else None,
        memory_by_phase_bytes=by_phase,
        caveats=sorted({caveat for report in found.values() for caveat in report.caveats}),
        side_changes=sorted({change for report in found.values() for change in report.side_changes}),
        unreproducible=sorted({change for report in found.values() for change in report.unreproducible}),
        flags={name: names for report in found.values() for name, names in report.flags.items()},
    )
    lead = found.get(0)
    if lead is None or lead.observed is None:
        return result
    steps = stats.summarise(lead.step_times_s)
    timed = steps if steps.n_steps > 0 else None
    retries = [report.alloc_retries for report in found.values() if report.alloc_retries is not None]
    return replace(
        result,
        steps=timed,
        step_times_s=lead.step_times_s,
        cpu_s_per_step=sum(_median(report.cpu_times_s[steps.n_warmup :]) for report in found.values())
        if timed
        else None,
        losses=lead.losses,
        samples_per_step=lead.observed.samples_per_step,
        tokens_per_step=lead.observed.tokens_per_step,
        phase_times_s=_highest(report.phase_times_s for report in found.values()),
        micro_step_s=_highest(report.micro_step_s for report in found.values()),
        alloc_retries=sum(retries) if retries else None,
        other_cores=lead.other_cores,
        observed=lead.observed,
        noise=lead.noise,
        gradient=lead.gradient,
    )


def _verdict(
    request: TrialRequest, found: Mapping[int, RankReport], end: Exit, phase: str
) -> tuple[Outcome, str, str, int | None]:
    if end.killed == "cancel":
        return Outcome.LOST, end.note or "stopped before it ended", phase, None
    if end.killed == "processes":
        return Outcome.CRASHED, end.note, phase, None
    failed = [report for report in found.values() if report.outcome not in (Outcome.COMPLETE, Outcome.STOPPED_EARLY)]
    if not failed and len(found) == request.world_size:
        last = found[0]  # the ranks decide together; whatever became of the processes after they had reported
        return last.outcome, last.reason, "done" if last.outcome is Outcome.COMPLETE else "measure", None
    if end.killed == "lost":
        return Outcome.LOST, end.note or "the process that watched the ranks died", phase, None
    # The cause is the earliest failure that is not the echo of a dead peer.
    failed.sort(key=lambda report: (_is_echo(report), report.failed_at or 0.0))
    if end.killed == "deadline" and end.first_failed is None and all(map(_is_echo, failed)):
        # Nothing had failed when the deadline came; a rank that fails after it lost the peers that were killed, maybe on another machine.
        return Outcome.TIMEOUT, f"no end within {request.deadline_s:g} s", phase, None
    # Ranks that ended without a word, by themselves: what the agent killed had no chance to say one.
    silent = [rank for rank in sorted(end.codes) if rank not in found and not _was_killed(rank, end)]
    if failed and not (_is_echo(failed[0]) and silent):
        return failed[0].outcome, failed[0].reason, failed[0].phase, failed[0].rank
    if silent:
        rank = end.first_failed if end.first_failed in silent else silent[0]
        return _silent_end(rank, end, phase)
    missing = next(rank for rank in range(request.world_size) if rank not in found)
    return Outcome.CRASHED, f"rank {missing} left no result", phase, missing


def _was_killed(rank: int, end: Exit) -> bool:
    return end.killed is not None and end.codes[rank] == -9 and rank != end.first_failed


def _silent_end(rank: int, end: Exit, phase: str) -> tuple[Outcome, str, str, int | None]:
    code = end.codes[rank]
    if code == 0:
        return Outcome.CRASHED, f"rank {rank} exited with status 0 but wrote no result", phase, rank
    if code == OOM_EXIT_CODE:
        return Outcome.OOM, "over the memory limit", phase, rank
    if code == -9 and end.kernel_oom:
        return Outcome.OOM, f"rank {rank} was killed by the kernel: out of memory", phase, rank
    how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
    return Outcome.CRASHED, f"rank {rank} {how}", phase, rank


def _is_echo(report: RankReport) -> bool:
    return report.outcome is Outcome.CRASHED and any(echo in report.reason.lower() for echo in ECHOES)


def _first_phase(found: Mapping[int, RankReport], entered: Mapping[int, str], end: Exit) -> str:
    """The phase of the rank that failed first; where none did, of the rank that came least far."""
    last = {**entered, **{rank: report.phase for rank, report in found.items()}}
    if end.first_failed in last:
        return last[end.first_failed]
    return min(last.values(), key=lambda phase: PHASES.index(phase) if phase in PHASES else 0, default="")


def _highest(tables: Any) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            merged[key] = max(value, merged.get(key, value))
    return merged


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
