"""Records of what is trained and where: model, data, training script, environment."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

from pydantic import AliasChoices, BeforeValidator, Field

from autotune.space.candidate import Candidate
from autotune.space.deepspeed import DsConfig, Scalar, precision_of, without_auto
from autotune.system.device import Device
from autotune.trial import lengths as lengths_of
from autotune.trial.profile import Machine, Profile

# Device memory of a process outside torch's allocator: CUDA's context, modules and libraries.
CUDA_CONTEXT_BYTES = 600 << 20
# The same of NCCL's channels where ranks talk: 544 MB with two A100, 688 MB with four (NVIDIA/nccl issue 964).
NCCL_BYTES = 700 << 20
# Share of a device's memory that is in use before a trial, from which on something else must hold it.
HELD_SHARE = 0.1
# Families of scripts, by the names in `Probed.family`.
TRAINER, ACCELERATE, LIGHTNING = "transformers' Trainer", "Accelerate", "Lightning"
# The batch in a DeepSpeed configuration.
TOTAL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Machine and libraries of a measurement.

    Attributes:
        accelerator: DeepSpeed's name of the device: `cpu`, `cuda` (ROCm too), and the untested `xpu`, `npu`, `hpu`.
        n_devices: Devices on this machine.
        device_memory_bytes: Memory of one device (of the whole machine on CPU).
        bf16: Whether the device computes in bfloat16.
        fp16: Whether DeepSpeed trains in fp16 on it.
        n_cores: Processor cores that this process may use.
        omp_num_threads: The user's own `OMP_NUM_THREADS`, if set.
        versions: Version of each library that a measurement depends on.
        capability: CUDA compute capability, or AMD's architecture; empty on a CPU.
        each: The visible devices in the order of the ranks; none on a CPU.
        free_bytes: Free memory of each visible device before the target ran; empty on a CPU.
        missing_ops: DeepSpeed's ops that cannot be compiled here, each with the reason and the remedy.
        remarks: Sentences for the user: a device that is not used, an accelerator that was never tested.
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
    capability: str = ""
    each: tuple[Device, ...] = ()
    free_bytes: tuple[int, ...] = ()
    missing_ops: dict[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def share_bytes(self, on_each: int, ranks: int = 0, at_once: int = 1) -> float:
        """Returns a rank's memory, of `ranks` in all: its device's but for context, NCCL and others; on a CPU its share of the host."""
        if self.accelerator == "cpu":
            return self.device_memory_bytes / (on_each * at_once)
        held = max(self._held_bytes(on_each), CUDA_CONTEXT_BYTES) + (NCCL_BYTES if max(on_each, ranks) > 1 else 0)
        return max(0.0, self.device_memory_bytes - held)

    def _held_bytes(self, on_each: int) -> int:
        """What was in use of the fullest of the ranks' devices, the context of the process that looked included."""
        # A script's ranks have looked on all machines, each at its own device alone.
        seen = self.free_bytes if len(self.free_bytes) > self.n_devices else self.free_bytes[:on_each]
        return self.device_memory_bytes - min(seen, default=self.device_memory_bytes)

    def held_by_others_bytes(self, on_each: int) -> float:
        """What other processes hold of the fullest of the ranks' devices, with a context; 0 where it is hardly any."""
        held = self._held_bytes(on_each)
        return float(held) if self.accelerator != "cpu" and held > HELD_SHARE * self.device_memory_bytes else 0.0


def threads_per_rank(n_cores: int, world_size: int, omp_num_threads: str | None) -> int:
    """Returns the CPU threads of a rank: the user's `OMP_NUM_THREADS`, else its share of the cores."""
    stated = int(omp_num_threads) if omp_num_threads and omp_num_threads.isdigit() else 0
    return stated or max(1, n_cores // world_size)


@dataclass(frozen=True, kw_only=True)
class DataShape:
    """Shape of the samples, as far as step time and memory depend on it.

    Attributes:
        fields: Each tensor of a sample: name, type and shape, with `*` for a size that varies between samples.
        n_seen: Samples in the table.
        n_samples: Samples in the data set; None for a stream.
        table: Lengths (tokens that count, else the largest dimension) with the number of samples that have them, ascending; see
            `lengths.table`.
        longest_at: Positions of the longest samples, longest first; empty for a stream.
        loader: Arguments of the target's own DataLoader, where it has one.
        cannot: Settings of the data that the target cannot follow, each with the reason.
        steps_grouped: Optimizer steps whose samples are sorted together where samples are grouped by length.
    """

    fields: tuple[str, ...]
    n_seen: int
    n_samples: int | None = None
    table: lengths_of.Table = ()
    longest_at: tuple[int, ...] = ()
    loader: dict[str, Scalar] = field(default_factory=dict)
    cannot: dict[str, str] = field(default_factory=dict)
    steps_grouped: int = 1

    @property
    def longest(self) -> int:
        """Returns the length of the longest sample that was seen; 0 if lengths were not kept."""
        return lengths_of.longest(self.table)

    @property
    def varies(self) -> bool:
        """Returns whether samples of different lengths were seen."""
        return len(self.table) > 1

    @property
    def whole(self) -> bool:
        """Returns whether every sample was read."""
        return self.n_samples is not None and self.n_seen >= self.n_samples


@dataclass(frozen=True, kw_only=True)
class Probed:
    """Findings of a run of the unchanged script.

    Attributes:
        ds_config: DeepSpeed configuration that it passed to `deepspeed.initialize`.
        micro_batch_size: Samples at the engine's forward; their mean where they vary (`uneven`).
        gradient_accumulation_steps: Backward calls per optimizer step; None if it varied.
        family: The framework above DeepSpeed, in words.
        checkpoint_every: Blocks whose activations it recomputes itself, as in a candidate.
        plain_backward: It calls `loss.backward()` or `torch.autograd.grad`, not `engine.backward(loss)` alone, or that of another engine.
        scales: It scales that loss by `engine.scale`, as fp16 needs, or trains in fp16 without.
        passes: Backward passes of a micro-batch at which DeepSpeed takes the gradients of a step for complete; 0 where it is told.
        movable: Candidate fields that changed in a second run that set all of them.
        moved_by: How that run changed them.
        flags: Flags that set a candidate field (or `ds_config`), by all their names.
        config_source: Path of the configuration's file; empty for a dict in the code.
        written_config: The file that the script writes it into by itself; empty where it writes none.
        initialized_at: File and line where the script calls `deepspeed.initialize`; empty where a framework does.
        configured_accumulation: Micro-batches per step in the engine's configuration; None if it was not read.
        counts_itself: It counts the micro-batches of a step itself, and DeepSpeed divides the loss by a number that stays.
        unsynced: It adds up their gradients within `engine.no_sync()`.
        model_parallel_size: Ranks that train one copy of the model together.
        sequence_size: Ranks over which each sequence is split.
        pipeline_stages: Stages of a `PipelineModule`; 0 for another model.
        expert_parallel: Experts are spread over ranks, as in DeepSpeed's mixtures of experts.
        learning_rates: Initial rate of each parameter group; None if the optimizer chooses it.
        draw_size: Samples of the loader's batches, if the script cuts them up; else 0.
        parts: Micro-batches that it makes of one of them.
        parts_follow: It makes as many parts as it accumulates.
        uneven: Samples of its smallest and its largest micro-batch, where they vary from step to step.
        configured_micro_batch_size: Samples in the engine's configuration; None if it was not read.
        replicas: Data-parallel ranks as the engine counts them: its global batch over its micro-batch and accumulation; 0 if not read.
        adds_up: It adds up the losses of its micro-batches, so that its gradient grows with their number.
        divides: It divides them by their number.
        paced: What of micro-batches its learning rate follows: their `number` (once `true`), that of the `loader`, their `size`; or empty.
        paced_beside: So does another model, which another optimizer trains.
        by_hand: What it changes itself between DeepSpeed's calls: `gradients`, `weights`.
        clips: It clips gradients itself, which the configuration does in its place.
        words: Names on the command line that carry a field, which the script reads by itself.
        stays: Fields that nothing moves, with what fills their templates: trials leave the script as it is in these.
    """

    ds_config: DsConfig
    micro_batch_size: int | None
    gradient_accumulation_steps: int | None
    family: str = "raw DeepSpeed"
    checkpoint_every: int = 0
    plain_backward: bool = False
    scales: bool = False
    passes: int = 1
    movable: tuple[str, ...] = ()
    moved_by: tuple[str, ...] = ()
    configured_accumulation: int | None = None
    counts_itself: bool = False
    unsynced: bool = False
    model_parallel_size: int = 1
    sequence_size: int = 1
    pipeline_stages: int = 0
    expert_parallel: bool = False
    learning_rates: tuple[float | None, ...] = ()
    flags: dict[str, list[str]] = field(default_factory=dict)
    config_source: str = ""
    written_config: str = ""
    initialized_at: str = ""
    draw_size: int = 0
    parts: int = 0
    parts_follow: bool = False
    uneven: tuple[int, int] | None = None
    configured_micro_batch_size: int | None = None
    replicas: int = 0
    adds_up: bool = False
    divides: bool = False
    paced: Annotated[str, BeforeValidator(lambda kept: "number" * kept if isinstance(kept, bool) else kept)] = ""
    paced_beside: bool = False
    by_hand: tuple[str, ...] = ()
    clips: bool = False
    words: dict[str, str] = field(default_factory=dict)
    stays: dict[str, Scalar] = field(default_factory=dict)

    def draw_sizes(self, candidate: Candidate) -> tuple[int, int] | None:
        """Returns the samples that the loader draws at once, without and with a candidate; None if that is no matter.

        A script that cuts its loader's batches up needs larger ones for a larger micro-batch.
        """
        follows = self.parts_follow and candidate.gradient_accumulation_steps != self.gradient_accumulation_steps
        parts = candidate.gradient_accumulation_steps if follows else self.parts
        if not self.parts or (candidate.micro_batch_size == self.micro_batch_size and not follows):
            return None
        return self.draw_size, candidate.micro_batch_size * parts

    @cached_property
    def precision(self) -> str:
        """The precision of its configuration, which a trial asks for at each forward pass."""
        return precision_of(without_auto(self.ds_config))

    @property
    def divides_again(self) -> bool:
        """Whether it divides losses as DeepSpeed does again, so that its gradient falls with the number of micro-batches."""
        return self.divides and not self.counts_itself

    def completed(self, config: DsConfig, candidate: Candidate) -> DsConfig:
        """Returns a candidate's DeepSpeed configuration, adapted to this script."""
        config = dict(config)
        if self.counts_itself:
            # The script accumulates itself; with the number in its configuration, DeepSpeed would accumulate again.
            config[STEPS] = self.configured_accumulation
        if "micro_batch_size" in self.stays and self.configured_micro_batch_size is not None:
            # What was counted may be no number of samples: scripts may make their batches by theirs, and frameworks compare it.
            config[MICRO] = self.configured_micro_batch_size
        if "token_budget" in candidate.data_changes:
            config[MICRO] = 1  # a row that holds the samples of a micro-batch
        if self.pipeline_stages:
            config = recomputing_in_runs(config, candidate, self.checkpoint_every)
        by_script = self.family not in (TRAINER, ACCELERATE, LIGHTNING)  # these fill it in
        if by_script and isinstance(self.ds_config.get(TOTAL), int) and self.replicas:  # it may make its batches by it
            replicas = self.replicas * max(1, self.pipeline_stages) // candidate.pipeline_degree
            config[TOTAL] = replicas * config[MICRO] * config[STEPS]
        return config


# What a probe itself knows of the script.
UNPROBED = Probed(ds_config={}, micro_batch_size=None, gradient_accumulation_steps=None)


@dataclass(frozen=True, kw_only=True)
class Script:
    """How a training script is run in a trial.

    Attributes:
        arguments: Its arguments, templates filled in except `{ds_config}` (this trial's file) and `{local_rank}`.
        module: Name of the module, if it is started as `python -m NAME`.
        environment: Variables for it, with the same templates.
        assignments: Module constants to replace, and their new values.
        probed: The unchanged script, by whose batch its flags and variables are recognised; nothing is known in a probe.
        carried: Candidate fields that the user's templates and mappings set; nothing else sets them.
        side_changes: Those settings, in words, that differ from the unchanged script.
    """

    arguments: tuple[str, ...] = ()
    working_dir: str = "."
    module: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    assignments: dict[str, str] = field(default_factory=dict)
    probed: Probed = UNPROBED
    carried: tuple[str, ...] = ()
    side_changes: tuple[str, ...] = ()


def recomputing_in_runs(config: DsConfig, candidate: Candidate, own: int = 0) -> DsConfig:
    """Returns the configuration with which a `PipelineModule` recomputes runs of as many layers as a candidate says.

    Args:
        own: Checkpoint interval of the target's own module in layers; 0 if it recomputes none.
    """
    section = {**config.get("pipeline", {}), "activation_checkpoint_interval": candidate.checkpoint_every}
    if candidate.checkpoint_every and not own:
        # Reentrant checkpointing, DeepSpeed's default, gives no gradient to a first layer that takes tokens.
        section["use_reentrant"] = False
    rest = {key: value for key, value in config.items() if key != "pipeline"}
    return rest | ({} if section == {"activation_checkpoint_interval": 0} else {"pipeline": section})


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A `PipelineModule` as the target builds it.

    Attributes:
        partition: How it shares its layers out among them: `uniform`, `parameters` or `type:CLASS`.
        partitions: The ways that it can.
        unfit: Why a stage would have nothing to train, by stages and way, as `key` writes them.
        fixed: Why its stages cannot be changed; empty if they can.
        dynamic: Stages tell each other the shape of every micro-batch, not of the first alone.
    """

    stages: int
    partition: str
    partitions: tuple[str, ...] = ()
    unfit: dict[str, str] = field(default_factory=dict)
    fixed: str = ""
    dynamic: bool = False

    @staticmethod
    def key(stages: int, partition: str) -> str:
        """Returns the key of a number of stages and of a way to share layers out."""
        return f"{stages} {partition}"


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixtures of experts of a model.

    Attributes:
        counts: Experts of a layer, each number once.
        parameters: Parameters of all these experts.
        per_token: Experts that a token passes in a layer.
        degree: Ranks over which the target itself shares them out.
        own: The layers are those of deepspeed.moe, whose degree is an argument; DeepSpeed's AutoEP shares out others.
        why_none: Why they cannot be shared out; empty if they can.
    """

    counts: tuple[int, ...] = ()
    layers: int = 0
    parameters: int = 0
    per_token: float = 1.0
    degree: int = 1
    own: bool = False
    why_none: str = ""

    def completed(self, config: DsConfig) -> DsConfig:
        """Returns a DeepSpeed configuration without AutoEP's section, which layers of deepspeed.moe do not read."""
        return {key: value for key, value in config.items() if key != "expert_parallel"} if self.own else config


@dataclass(frozen=True, kw_only=True)
class Splitting:
    """Facts of a model that decide over how many ranks its layers or its sequences can be split.

    Attributes:
        heads: Attention heads; 0 if unknown.
        kv_heads: Heads of keys and values; 0 if unknown.
        tensor: Why DeepSpeed finds no layers to split by itself; empty if it does.
        sequence: Why sequences cannot be split over ranks; empty if they can.
        compared: What came of splitting the model, by degree and ranks as `key` writes them; empty where loss and
            gradient were those of the whole model.
    """

    heads: int = 0
    kv_heads: int = 0
    tensor: str = ""
    sequence: str = ""
    compared: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def key(path: str, degree: int, world_size: int, settings: Any = None) -> str:
        """Returns the key of a comparison: the degree, the ranks, and the settings beside it."""
        return f"{path}={degree} of {world_size}" + (f" {json.dumps(settings, sort_keys=True)}" if settings else "")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Findings about the user's target and its environment, by one rank.

    Attributes:
        n_parameters: Parameters of the model, tied ones once.
        n_trainable: Of these, the trainable ones.
        n_samples: Samples in the data set; None for `batch(n)` and endless data.
        n_blocks: Repeated blocks that activation checkpointing can wrap.
        block_class: Class of these blocks.
        block_share: Their share of the parameters.
        float_buffers: The model has floating-point buffers, as batch normalisation does.
        by_micro_batch: What trains otherwise at another micro-batch: layers with its statistics, a script's loop. Once `batch_norm`.
        client_optimizer: The target makes the optimizer: a configuration's gives way to a script's, and replaces that of a model.py.
        sparse: Classes of its modules that give sparse gradients; empty without any.
        updates: Classes of modules in the blocks that change a buffer in each forward, also a recomputed one; empty without any.
        optimizer: Class of that optimizer, if it could be made without data.
        learning_rates: Rates that its parameter groups begin with.
        script: Findings of the probe, for a training script.
        profile: Quantities that determine memory and time; None if it was not profiled.
        machine: Rates of the machine with all ranks at work; None if they were not measured.
        structure: Digest of the model's modules and parameters; empty if it was not taken.
        module_classes: Classes of its modules that have both parameters and modules of their own.
        data: Shape of the samples; None if none could be drawn.
        splitting: Facts that decide about degrees; None for a script, which feeds its own ranks.
        pipeline: The `PipelineModule` that the model is; None for another model.
        experts: Its mixtures of experts; None without any.
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
    by_micro_batch: Annotated[str, Field(validation_alias=AliasChoices("by_micro_batch", "batch_norm"))] = ""
    sparse: str = ""
    updates: str = ""
    optimizer: str = ""
    learning_rates: tuple[float, ...] = ()
    caveats: list[str] = field(default_factory=list)
    script: Probed | None = None
    profile: Profile | None = None
    machine: Machine | None = None
    structure: str = ""
    module_classes: tuple[str, ...] = ()
    data: DataShape | None = None
    splitting: Splitting | None = None
    pipeline: Pipeline | None = None
    experts: Experts | None = None

    def data_parallel(self, world_size: int) -> int:
        """Returns the ranks without those of a script's own groups; candidates divide out their own degrees."""
        return world_size // (self.script.model_parallel_size if self.script else 1)

    def scales_otherwise(self, candidate: Candidate, baseline: Candidate) -> bool:
        """Returns whether a script's gradient, which depends on the accumulation, has another scale than in the baseline."""
        scales = self.script is not None and (self.script.adds_up or self.script.divides_again)
        return scales and candidate.gradient_accumulation_steps != baseline.gradient_accumulation_steps

    def updates_otherwise(self, candidate: Candidate, baseline: Candidate) -> bool:
        """Returns whether other blocks are recomputed than in the baseline, where that changes buffers that a forward updates."""
        return bool(self.updates) and candidate.checkpoint_every != baseline.checkpoint_every

    def ds_config(self, candidate: Candidate, base_config: DsConfig) -> DsConfig:
        """Returns the complete DeepSpeed configuration of a candidate over the user's own."""
        config = candidate.to_deepspeed(base_config)
        if self.experts is not None:
            config = self.experts.completed(config)
        if self.script is not None:
            return self.script.completed(config, candidate)
        return recomputing_in_runs(config, candidate) if self.pipeline is not None else config
