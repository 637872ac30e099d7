"""One training configuration: what it is, whether it can run here, and the DeepSpeed JSON it means."""

from __future__ import annotations

import copy
import difflib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from autotune import UserError

Scalar: TypeAlias = str | int | float | bool | None
DsConfig: TypeAlias = dict[str, Any]

PRECISIONS = ("fp32", "bf16", "fp16", "torch_autocast", "torch_autocast_fp16")
DTYPES = ("bf16", "fp16")
DEVICES = ("none", "cpu", "nvme")
# The precision that computes in the same 16 bits and mixes types where an operation needs it.
AUTOCAST = {"bf16": "torch_autocast", "fp16": "torch_autocast_fp16"}
# Name of the trial attribute that holds `Candidate.key`.
CANDIDATE_ATTR = "candidate"
ONE_BIT_OPTIMIZERS = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")

# Top-level keys that DeepSpeed reads (deepspeed/runtime/config.py and the config classes it builds, 0.15 to 0.19).
# DeepSpeed ignores any other top-level key silently, so a typo there would be tuned and exported without effect.
TOP_LEVEL_KEYS = frozenset(
    """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation optimizer
    scheduler fp16 bf16 torch_autocast zero_optimization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    communication_data_type seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor
    gradient_allreduce_op gradient_clipping data_types steps_per_print wall_clock_breakdown memory_breakdown dump_state
    disable_allgather disable_python_gc activation_checkpointing flops_profiler comms_logger tensorboard wandb comet
    csv_monitor monitor_config aio pipeline checkpoint data_efficiency hybrid_engine autotuning dataloader_drop_last
    log_level datastates_ckpt compile timers tensor_parallel expert_parallel sequence_parallel_size
    use_data_before_expert_parallelism weight_quantization vocabulary_size nebula train_seq_parallel inference
    elasticity sparse_gradients amp curriculum_learning compression_training eigenvalue progressive_layer_drop
    sparse_attention graph_harvesting
    """.split()
)
# Top-level keys that DeepSpeed once read and now refuses, with the version that dropped them (`_REMOVED_TOP_LEVEL_CONFIG_KEYS`).
RETIRED_KEYS = dict.fromkeys(
    """
    elasticity sparse_gradients amp curriculum_learning compression_training eigenvalue progressive_layer_drop sparse_attention
    graph_harvesting
    """.split(),
    (0, 19, 8),
)
# Keys inside the sections that DeepSpeed validates strictly; sections that are not here are passed through unchecked.
SECTION_KEYS: dict[str, frozenset[str]] = {
    "zero_optimization": frozenset(
        """
        stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
        allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights
        elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size cpu_offload_param
        cpu_offload_use_pin_memory cpu_offload stage3_prefetch_bucket_size stage3_param_persistence_threshold
        stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
        stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold
        stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential stage3_gather_fp16_weights_on_model_save
        ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment zero_hpz_partition_size
        zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param
        mics_shard_size mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint
        override_module_apply log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory
        leaf_module
        """.split()
    ),
    "bf16": frozenset(
        "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states".split()
    ),
    "fp16": frozenset(
        """
        enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis
        min_loss_scale fp16_master_weights_and_grads
        """.split()
    ),
    "torch_autocast": frozenset("enabled dtype lower_precision_safe_modules".split()),
    "data_types": frozenset("grad_accum_dtype param_dtype buffer_dtype".split()),
}
# Paths that a Candidate field owns: a dotted knob for one of them would fight with the field.
OWNED_PATHS = {
    "train_batch_size": "micro_batch_size and gradient_accumulation_steps",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer.device": "offload_optimizer",
    "zero_optimization.offload_param.device": "offload_param",
    "bf16.enabled": "precision",
    "fp16.enabled": "precision",
    "torch_autocast.enabled": "precision",
    "torch_autocast.dtype": "precision",
    "optimizer.type": "optimizer",
}
# Sections that write files, call services or add work to every step: kept in the export, left out of trials.
SIDE_EFFECT_KEYS = frozenset(
    """
    tensorboard wandb comet csv_monitor monitor_config flops_profiler comms_logger wall_clock_breakdown
    memory_breakdown dump_state autotuning
    """.split()
)
# Databases, torch and DeepSpeed hold no larger whole number; sys.maxsize is a value of DeepSpeed's own.
LARGEST = 2**63 - 1
LARGEST_BATCH = 2**31 - 1
DEEPEST = 50
STAGE_3_PREFIXES = (
    "stage3_",
    "zero_hpz",
    "zero_quantized",
    "offload_param",
    "cpu_offload_param",
    "leaf_module",
    "mics_",
    "zeropp_",
)


class ConfigError(UserError):
    """A DeepSpeed configuration or a candidate that cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One configuration to train with.

    Attributes:
        micro_batch_size: Samples that one rank passes through the model at once.
        gradient_accumulation_steps: Micro-batches per optimizer step.
        zero_stage: DeepSpeed ZeRO stage, 0 to 3.
        precision: One of `PRECISIONS`; `torch_autocast` computes in bfloat16 over fp32 weights.
        checkpoint_every: 0 keeps all activations; k recomputes every k-th repeated block.
        offload_optimizer: Where optimizer states live: the device (`none`), `cpu` or `nvme`.
        offload_param: Where ZeRO-3 parameters live between uses.
        optimizer: `keep` the user's, or one of `ONE_BIT_OPTIMIZERS`.
        config: Further DeepSpeed settings as sorted (dotted path, value) pairs; a value of None leaves the key out.
    """

    micro_batch_size: int
    gradient_accumulation_steps: int = 1
    zero_stage: int = 0
    precision: str = "fp32"
    checkpoint_every: int = 0
    offload_optimizer: str = "none"
    offload_param: str = "none"
    optimizer: str = "keep"
    config: tuple[tuple[str, Scalar], ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Scalar]) -> Candidate:
        """Builds a candidate from flat knob values; a name with a dot is a DeepSpeed path.

        Raises:
            ConfigError: A name is neither a field nor a known DeepSpeed path, or a value is not one the field takes.
        """
        own: dict[str, Any] = {name: value for name, value in values.items() if name in FIELDS}
        config = {name: value for name, value in values.items() if name not in FIELDS and value is not None}
        for name in config:
            check_knob(name)
        for name, value in own.items():
            check_value(name, value)
        if "micro_batch_size" not in own:
            raise ConfigError("candidate: micro_batch_size is missing")
        return cls(**own, config=tuple(sorted(config.items())))

    def values(self) -> dict[str, Scalar]:
        """The candidate as flat knob values; `Candidate.of` is the inverse."""
        return {name: getattr(self, name) for name in FIELDS} | dict(self.config)

    @property
    def key(self) -> str:
        """The candidate's identity as one text; `from_key` reads it back."""
        return json.dumps(self.values(), sort_keys=True)

    @classmethod
    def from_key(cls, key: str) -> Candidate:
        """The candidate of a key."""
        return cls.of(json.loads(key))

    def global_batch_size(self, world_size: int) -> int:
        """Samples per optimizer step over all ranks."""
        return self.micro_batch_size * self.gradient_accumulation_steps * world_size

    def describe(self, baseline: Candidate | None = None) -> str:
        """The candidate in a few words: the batch, and whatever differs from the defaults (or from `baseline`)."""
        reference = baseline.values() if baseline else {"precision": None, "zero_stage": None}
        default = Candidate(micro_batch_size=0).values()
        words = [f"{self.micro_batch_size}x{self.gradient_accumulation_steps}", self.precision, f"z{self.zero_stage}"]
        for name, value in self.values().items():
            plain = name in ("micro_batch_size", "gradient_accumulation_steps", "precision", "zero_stage")
            if not plain and value != reference.get(name, default.get(name)):
                words.append(f"{name.rsplit('.', 1)[-1]}={value}")
        return " ".join(words)

    def to_deepspeed(self, base: Mapping[str, Any] | None = None) -> DsConfig:
        """The DeepSpeed configuration of this candidate over the user's own.

        The batch and the precision are replaced as groups; `zero_optimization` is merged, then keys that the stage
        does not know are dropped; everything else of the user's stays.

        Args:
            base: The user's DeepSpeed configuration; its values of "auto" are dropped, but for `data_types.buffer_dtype`,
                which then follows 16-bit weights: DeepSpeed keeps buffers in fp32 otherwise, and batch normalisation
                fails on the mixture.
        """
        config = copy.deepcopy(dict(base or {}))
        follows = self.precision in DTYPES and config.get("data_types", {}).get("buffer_dtype") == "auto"
        config = without_auto(config)
        if follows:
            set_path(config, "data_types.buffer_dtype", self.precision)
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            config.pop(key, None)
        config = {
            "train_micro_batch_size_per_gpu": self.micro_batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            **config,
        }
        self._set_precision(config)
        self._set_zero(config)
        if self.optimizer != "keep":
            params = config.get("optimizer", {}).get("params", {})
            config["optimizer"] = {
                "type": self.optimizer,
                "params": {k: v for k, v in params.items() if k in ("lr", "betas")},
            }
        for path, value in self.config:
            set_path(config, path, value)
        return config

    def illegal(self, setting: Setting) -> str | None:
        """Why this candidate cannot run (or can have no effect) in a setting; None if nothing speaks against it."""
        rule = next(self.broken_rules(setting), None)
        if rule is None:
            return None
        bounds = "..".join(map(str, setting.global_batch)) if setting.global_batch else ""
        facts = {field.name: getattr(setting, field.name) for field in fields(setting)} | self.values()
        return rule.why.format(
            **(facts | {"global_batch": bounds, "batch": self.global_batch_size(setting.world_size)})
        )

    def broken_rules(self, setting: Setting) -> Iterator[Rule]:
        """The rules that speak against this candidate in a setting."""
        config = {**self._inherited(setting), **dict(self.config)} if setting.base else dict(self.config)
        return (rule for rule in RULES if rule.broken(self, config, setting))

    def _inherited(self, setting: Setting) -> dict[str, Scalar]:
        """What of the user's own configuration `to_deepspeed` keeps for this candidate, of what the rules look at."""
        return {
            path: value
            for path, value in setting.base
            if (path.startswith("bf16.") and self.precision == "bf16")
            or (path.startswith("data_types.") and self.precision in DTYPES)
            or (path.endswith("nvme_path") and self.zero_stage > 0)
        }

    def _set_precision(self, config: DsConfig) -> None:
        kept = {name: config.pop(name, {}) for name in ("bf16", "fp16", "torch_autocast", "amp")}
        if self.precision in DTYPES:
            config[self.precision] = {**kept[self.precision], "enabled": True}
        elif self.precision.startswith("torch_autocast"):
            dtype = "float16" if self.precision.endswith("fp16") else "bfloat16"
            config["torch_autocast"] = {**kept["torch_autocast"], "enabled": True, "dtype": dtype}
        if self.precision not in DTYPES and "data_types" in config:
            config["data_types"] = {
                key: value for key, value in config["data_types"].items() if key != "grad_accum_dtype"
            }
            if not config["data_types"]:
                del config["data_types"]

    def _set_zero(self, config: DsConfig) -> None:
        zero = config.pop("zero_optimization", {})
        if self.zero_stage == 0:
            return
        zero = {
            key: value for key, value in zero.items() if self.zero_stage == 3 or not key.startswith(STAGE_3_PREFIXES)
        }
        for section, device in (("offload_optimizer", self.offload_optimizer), ("offload_param", self.offload_param)):
            kept = zero.pop(section, None) or {}
            if device != "none":
                zero[section] = {**(kept if kept.get("device") == device else {}), "device": device}
        config["zero_optimization"] = {"stage": self.zero_stage, **{k: v for k, v in zero.items() if k != "stage"}}
        if "optimizer" not in config:
            # A client optimizer that DeepSpeed has not tested itself is refused under ZeRO without this.
            config["zero_allow_untested_optimizer"] = True
            if self.offload_optimizer != "none":
                config["zero_force_ds_cpu_optimizer"] = False


FIELDS = tuple(field.name for field in fields(Candidate) if field.name != "config")
CHOICES: dict[str, tuple[Scalar, ...]] = {
    "zero_stage": (0, 1, 2, 3),
    "precision": PRECISIONS,
    "offload_optimizer": DEVICES,
    "offload_param": ("none", "cpu", "nvme"),
    "optimizer": ("keep", *ONE_BIT_OPTIMIZERS),
}
AT_LEAST = {"micro_batch_size": 1, "gradient_accumulation_steps": 1, "checkpoint_every": 0}


def nearest(name: str, known: Iterable[str]) -> str:
    """`Did you mean ...?` for the closest of the known names, or an empty text."""
    close = difflib.get_close_matches(
        str(name)[:100], list(known), n=1, cutoff=0.6
    )  # comparing takes long where both are
    return f" Did you mean {close[0]!r}?" if close else ""


def check_knob(name: str) -> None:
    """Refuses a knob that is neither a Candidate field nor a path that DeepSpeed reads.

    Raises:
        ConfigError: It says which names are near.
    """
    if name in FIELDS:
        return
    if name in OWNED_PATHS and name not in FIELDS:
        raise ConfigError(f"knob {name!r}: use {OWNED_PATHS[name]!r} instead")
    if "." not in name and name not in TOP_LEVEL_KEYS:
        raise ConfigError(
            f"unknown knob {name!r}.{nearest(name, [*FIELDS, *TOP_LEVEL_KEYS])} Known: {', '.join(FIELDS)}, or a DeepSpeed path with dots"
        )
    check_path(name)


def check_path(path: str) -> None:
    """Refuses a DeepSpeed path whose section or key DeepSpeed does not read."""
    section, _, rest = path.partition(".")
    if "" in path.split("."):
        raise ConfigError(f"{path!r}: a path is names with one dot between them, as in zero_optimization.overlap_comm")
    if section not in TOP_LEVEL_KEYS:
        raise ConfigError(f"DeepSpeed has no key {section!r} (in {path!r}).{nearest(section, TOP_LEVEL_KEYS)}")
    key = rest.partition(".")[0]
    if key and section in SECTION_KEYS and key not in SECTION_KEYS[section]:
        raise ConfigError(
            f"DeepSpeed's {section!r} has no key {key!r} (in {path!r}).{nearest(key, SECTION_KEYS[section])}"
        )


def check_value(name: str, value: Scalar) -> None:
    """Refuses a value that the Candidate field does not take.

    Raises:
        ConfigError: It lists the values that the field takes.
    """
    check_plain(value, name)
    if name in CHOICES:
        if value not in CHOICES[name] or isinstance(value, bool | float):
            raise ConfigError(f"{name}: {value!r} is not one of {', '.join(map(str, CHOICES[name]))}")
    elif name in AT_LEAST and (not isinstance(value, int) or isinstance(value, bool) or value < AT_LEAST[name]):
        raise ConfigError(f"{name}: {value!r} is not a whole number of at least {AT_LEAST[name]}")
    elif name in AT_LEAST and isinstance(value, int) and value > LARGEST_BATCH:
        raise ConfigError(f"{name}: {value!r} is more than {LARGEST_BATCH:,}")


def set_path(config: DsConfig, path: str, value: Any) -> None:
    """Sets a dotted path in a nested configuration, making the sections on the way.

    Raises:
        ConfigError: There is a value where a section has to be.
    """
    *sections, key = path.split(".")
    for section in sections:
        if config.get(section) is None:
            config[section] = {}
        config = config[section]
        if not isinstance(config, dict):
            raise ConfigError(
                f"{path}: {section!r} is {config!r} and no section of settings, so that nothing in it can be set"
            )
    config[key] = value


def check_retired(config: Mapping[str, Any], deepspeed_version: str, where: str) -> None:
    """Refuses a key that the installed DeepSpeed no longer takes.

    Raises:
        ConfigError: It names the key and the version.
    """
    for key, since in RETIRED_KEYS.items():
        if key in config and version(deepspeed_version) >= since:
            raise ConfigError(f"{where}: {key!r} is no longer read by DeepSpeed {deepspeed_version}; remove it")


def without_auto(config: DsConfig) -> DsConfig:
    """The configuration without the values "auto" that Hugging Face fills in; a section left empty goes with them."""
    kept: DsConfig = {}
    for key, value in config.items():
        if isinstance(value, dict):
            inner = without_auto(value)
            if inner or not value:
                kept[key] = inner
        elif value != "auto":
            kept[key] = value
    return kept


def check_plain(value: Any, where: str, depth: int = 0) -> None:
    """Refuses what JSON or a database cannot hold: infinities, texts that are none, keys that are numbers, numbers and depths without end.

    Raises:
        ConfigError: It names the key.
    """
    match value:
        case None | bool():
            return
        case int():
            if abs(value) > LARGEST:
                raise ConfigError(
                    f"{where}: a whole number of {value.bit_length()} bits is more than any setting takes"
                )
        case float():
            if not math.isfinite(value):
                raise ConfigError(f"{where}: {value} is no number that can be used; give one, or leave the key out")
        case str():
            if not _is_text(value):
                raise ConfigError(f"{where}: {value[:60]!r} holds a character that is none; write plain text")
        case dict() | list() | tuple():
            if depth >= DEEPEST:
                raise ConfigError(
                    f"{where[:200]}: it is nested more than {DEEPEST} deep, as no DeepSpeed configuration is"
                )
            parts: Iterable[tuple[Any, Any]] = (
                value.items() if isinstance(value, dict) else [(None, inner) for inner in value]
            )
            for key, inner in parts:
                if key is not None and not (isinstance(key, str) and _is_text(key)):
                    raise ConfigError(f"{where}: {key!r} is no name of a setting; put a name in quotation marks")
                check_plain(inner, where if key is None else f"{where}: {key[:60]}", depth + 1)
        case _:
            raise ConfigError(f"{where}: {value!r} is no plain value; give a text, a number, true or false")


def _is_text(value: str) -> bool:
    """Whether a text can be written in UTF-8 and handed to another process."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value


def at_path(config: Mapping[str, Any], path: str) -> Any:
    """What a dotted path leads to; None where there is nothing."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def from_deepspeed(config: Mapping[str, Any], world_size: int, where: str = "base config") -> Candidate:
    """The candidate that a DeepSpeed configuration means, as DeepSpeed itself resolves it.

    Of batch, micro-batch and accumulation any two give the third (deepspeed/runtime/config.py,
    `_set_batch_related_parameters`).

    Raises:
        ConfigError: The batch sizes are missing, contradictory or do not divide by the ranks.
    """
    config = without_auto(dict(config))
    micro, steps = _batch(config, world_size, where)
    zero = config.get("zero_optimization", {})
    values: dict[str, Scalar] = {
        "micro_batch_size": micro,
        "gradient_accumulation_steps": steps,
        "zero_stage": zero.get("stage", 0),
        "precision": precision_of(config),
        "offload_optimizer": _device(zero, "offload_optimizer"),
        "offload_param": _device(zero, "offload_param"),
    }
    if config.get("optimizer", {}).get("type") in ONE_BIT_OPTIMIZERS:
        values["optimizer"] = config["optimizer"]["type"]
    try:
        return Candidate.of(values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _batch(config: Mapping[str, Any], world_size: int, where: str) -> tuple[int, int]:
    total, micro, steps = (
        config.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    for key, value in (
        ("train_batch_size", total),
        ("train_micro_batch_size_per_gpu", micro),
        ("gradient_accumulation_steps", steps),
    ):
        if value is not None and (
            not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST_BATCH
        ):
            raise ConfigError(
                f"{where}: {key}: {value!r} is not a whole number of at least 1 (and at most {LARGEST_BATCH:,})"
            )
    if micro is None and total is None:
        raise ConfigError(
            f"{where}: train_micro_batch_size_per_gpu is missing (or train_batch_size); DeepSpeed needs one of them"
        )
    if micro is None:
        assert total is not None
        micro = total // world_size // (steps or 1)
    if steps is None:
        steps = total // (micro * world_size) if total is not None and micro else 1
    if total is not None and total != micro * steps * world_size:
        raise ConfigError(
            f"{where}: train_batch_size {total} is not micro-batch {micro} x accumulation {steps} x {world_size} ranks;"
            " change it or pass --ranks"
        )
    return int(micro), int(steps)


def precision_of(config: Mapping[str, Any]) -> str:
    """The precision that a DeepSpeed configuration means, one of `PRECISIONS`."""
    for precision in ("bf16", "fp16"):
        if config.get(precision, {}).get("enabled"):
            return precision
    autocast = config.get("torch_autocast", {})
    if autocast.get("enabled"):
        return (
            "torch_autocast_fp16"
            if str(autocast.get("dtype", "")).endswith(("float16", "fp16", "half"))
            and "b" not in str(autocast.get("dtype"))
            else "torch_autocast"
        )
    return "fp32"


def _device(zero: Mapping[str, Any], section: str) -> str:
    return str((zero.get(section) or {}).get("device", "none")) if isinstance(zero.get(section), dict) else "none"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What legality depends on: the machine, the libraries and the workload.

    Attributes:
        accelerator: `cpu` or `cuda` (DeepSpeed's name of it).
        deepspeed_version: Installed version, as in 0.19.8.
        world_size: Ranks of a trial that have data of their own: all of them, but for the stages of a pipeline.
        ranks_per_node: The same on one machine.
        pipeline_stages: Stages of a `PipelineModule`; 0 for another model.
        bf16: Whether the device computes in bfloat16.
        fp16: Whether DeepSpeed accepts fp16 on the device.
        n_blocks: Repeated blocks of the model that can be checkpointed.
        n_samples: Samples in the data set; None where it has no end.
        global_batch: Allowed samples per optimizer step, lowest and highest.
        client_optimizer: The workload makes its own optimizer instead of the DeepSpeed JSON.
        plain_backward: The workload calls `loss.backward()`, not `engine.backward(loss)`.
        base: Settings of the user's own configuration that candidates inherit and rules look at; see `inherited_settings`.
        unsafe_precisions: Precisions in which trials of this workload ended with a dtype mismatch.
    """

    accelerator: str = "cpu"
    deepspeed_version: str = "0.19.8"
    world_size: int = 1
    ranks_per_node: int = 1
    pipeline_stages: int = 0
    bf16: bool = True
    fp16: bool = False
    n_blocks: int = 0
    n_samples: int | None = None
    global_batch: tuple[int, int] | None = None
    client_optimizer: bool = False
    plain_backward: bool = False
    base: tuple[tuple[str, Scalar], ...] = ()
    unsafe_precisions: tuple[str, ...] = ()


INHERITED_PATHS = (
    "data_types.grad_accum_dtype",
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.nvme_path",
    # What only forecasts look at.
    "communication_data_type",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.overlap_comm",
    "zero_optimization.contiguous_gradients",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.stage3_max_reuse_distance",
)


def inherited_settings(base: Mapping[str, Any]) -> tuple[tuple[str, Scalar], ...]:
    """The settings of a DeepSpeed configuration that legality depends on, as `Setting.base` takes them."""
    return tuple((path, value) for path in INHERITED_PATHS if (value := at_path(base, path)) is not None)


@dataclass(frozen=True)
class Rule:
    """A reason why DeepSpeed (or the workload) refuses a candidate in a setting, or why the candidate is pointless."""

    broken: Callable[[Candidate, dict[str, Scalar], Setting], bool]
    why: str


def version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparison: 0.19.8+cu12 -> (0, 19, 8)."""
    numbers = []
    for part in text.split("+", maxsplit=1)[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _quantised(config: Mapping[str, Scalar]) -> bool:
    return any(
        config.get(f"zero_optimization.zero_quantized_{name}")
        for name in ("weights", "gradients", "nontrainable_weights")
    )


# Each rule was met as a failed (or silently useless) run; see docs/decisions/0002-legality.md.
RULES: tuple[Rule, ...] = (
    Rule(
        lambda c, k, s: c.precision == "fp16" and not s.fp16,
        "fp16: this device has no fp16 training in DeepSpeed; use bf16 or torch_autocast",
    ),
    Rule(
        lambda c, k, s: c.precision == "torch_autocast_fp16" and not s.fp16,
        "torch_autocast_fp16: this device has no fp16 arithmetic; use torch_autocast",
    ),
    Rule(
        lambda c, k, s: c.precision in ("bf16", "torch_autocast") and not s.bf16,
        "{precision}: this device does not compute in bfloat16",
    ),
    Rule(
        lambda c, k, s: c.precision in s.unsafe_precisions,
        "{precision}: the model mixes types of numbers, which trials ended at; torch_autocast computes in 16 bits over fp32 weights",
    ),
    Rule(
        lambda c, k, s: c.checkpoint_every > 0 and s.n_blocks == 0,
        "checkpoint_every: the model has no repeated block to checkpoint; name them in `blocks`",
    ),
    Rule(
        lambda c, k, s: c.checkpoint_every > max(s.n_blocks, 1),
        "checkpoint_every={checkpoint_every}: the model has only {n_blocks} blocks",
    ),
    Rule(
        lambda c, k, s: s.n_samples is not None and c.global_batch_size(s.world_size) > s.n_samples,
        "global batch {batch}: the data set has only {n_samples} samples",
    ),
    Rule(
        lambda c, k, s: (
            s.global_batch is not None
            and not s.global_batch[0] <= c.global_batch_size(s.world_size) <= s.global_batch[1]
        ),
        "global batch {batch} is outside {global_batch}",
    ),
    Rule(
        lambda c, k, s: c.zero_stage == 0 and s.plain_backward,
        "ZeRO stage 0: DeepSpeed refuses loss.backward() there; call engine.backward(loss)",
    ),
    Rule(
        lambda c, k, s: c.zero_stage > 1 and s.pipeline_stages > 0,
        "ZeRO stage {zero_stage}: DeepSpeed refuses it with a PipelineModule, whose stages share out the model already; use 0 or 1",
    ),
    Rule(
        lambda c, k, s: s.pipeline_stages > 0 and c.checkpoint_every > 0 and c.precision.startswith("torch_autocast"),
        "{precision}: a PipelineModule recomputes its layers outside of autocast, where they meet other types; use bf16",
    ),
    Rule(
        lambda c, k, s: c.offload_optimizer != "none" and c.zero_stage == 0,
        "offload_optimizer needs ZeRO stage 1 or more",
    ),
    Rule(lambda c, k, s: c.offload_param != "none" and c.zero_stage != 3, "offload_param needs ZeRO stage 3"),
    Rule(
        lambda c, k, s: s.accelerator == "cpu" and {c.offload_optimizer, c.offload_param} != {"none"},
        "offload: on a CPU the host memory is the device memory, so there is nothing to move",
    ),
    Rule(
        lambda c, k, s: any(
            device == "nvme" and not k.get(f"zero_optimization.{section}.nvme_path")
            for section, device in (("offload_optimizer", c.offload_optimizer), ("offload_param", c.offload_param))
        ),
        "offload to nvme needs its nvme_path in the base config",
    ),
    Rule(
        lambda c, k, s: k.get("zero_optimization.overlap_comm") is True and s.accelerator == "cpu",
        "overlap_comm: a CPU has no streams, so nothing can overlap",
    ),
    Rule(
        lambda c, k, s: c.zero_stage == 0 and any(name.startswith("zero_optimization.") for name in dict(c.config)),
        "zero_optimization settings have no effect at ZeRO stage 0",
    ),
    Rule(
        lambda c, k, s: (
            c.zero_stage != 3
            and any(name.removeprefix("zero_optimization.").startswith(STAGE_3_PREFIXES) for name in k)
        ),
        "stage-3 settings need ZeRO stage 3",
    ),
    Rule(
        lambda c, k, s: bool(k.get("zero_optimization.stage3_module_granularity_threshold")),
        "stage3_module_granularity_threshold fails with a shape error in DeepSpeed",
    ),
    Rule(
        lambda c, k, s: any(name.startswith("bf16.") for name in k) and c.precision != "bf16",
        "bf16 settings need precision bf16",
    ),
    Rule(
        lambda c, k, s: any(name.startswith("fp16.") for name in k) and c.precision != "fp16",
        "fp16 settings need precision fp16",
    ),
    Rule(
        lambda c, k, s: bool(k.get("bf16.bf16_master_weights_and_grads")) and c.zero_stage == 0,
        "bf16 master weights need ZeRO stage 1, 2 or 3",
    ),
    Rule(
        lambda c, k, s: bool(k.get("bf16.bf16_optimizer_states")) and not k.get("bf16.bf16_master_weights_and_grads"),
        "bf16_optimizer_states needs bf16_master_weights_and_grads",
    ),
    Rule(
        lambda c, k, s: (
            bool(k.get("bf16.bf16_master_weights_and_grads"))
            and not k.get("bf16.bf16_optimizer_states")
            and c.offload_optimizer != "cpu"
        ),
        "bf16 master weights without bf16 optimizer states need the optimizer offloaded to the CPU",
    ),
    Rule(
        lambda c, k, s: k.get("data_types.grad_accum_dtype") is not None and c.precision not in ("bf16", "fp16"),
        "grad_accum_dtype has an effect only with precision bf16 or fp16",
    ),
    Rule(
        lambda c, k, s: k.get("data_types.grad_accum_dtype") == "fp32" and c.zero_stage == 0,
        "grad_accum_dtype fp32 with 16-bit weights is not implemented at ZeRO stage 0",
    ),
    Rule(
        lambda c, k, s: (
            k.get("data_types.grad_accum_dtype") is not None and bool(k.get("bf16.bf16_master_weights_and_grads"))
        ),
        "grad_accum_dtype contradicts bf16 master weights and gradients",
    ),
    Rule(
        lambda c, k, s: k.get("communication_data_type") is not None and s.world_size == 1,
        "communication_data_type: one rank communicates nothing",
    ),
    Rule(
        lambda c, k, s: k.get("communication_data_type") == "fp16" and not s.fp16 and s.accelerator != "cpu",
        "communication_data_type fp16: no fp16 on this device",
    ),
    Rule(lambda c, k, s: _quantised(k) and s.accelerator != "cuda", "ZeRO++ quantisation needs a CUDA op of DeepSpeed"),
    Rule(
        lambda c, k, s: bool(k.get("zero_optimization.zero_quantized_gradients")) and s.world_size <= s.ranks_per_node,
        "zero_quantized_gradients has no effect on one node",
    ),
    Rule(
        lambda c, k, s: _hpz(k) > 1 and (s.world_size % _hpz(k) != 0 or _hpz(k) >= s.world_size),
        "zero_hpz_partition_size must divide the {world_size} ranks and be smaller",
    ),
    Rule(
        lambda c, k, s: c.precision.startswith("torch_autocast") and version(s.deepspeed_version) < (0, 17, 2),
        "{precision} is not in DeepSpeed {deepspeed_version}: it came with 0.17.2",
    ),
    Rule(
        lambda c, k, s: (
            bool(k.get("bf16.bf16_master_weights_and_grads") or k.get("bf16.bf16_optimizer_states"))
            and version(s.deepspeed_version) < (0, 18, 3)
        ),
        "bf16 master weights and optimizer states are ignored by DeepSpeed {deepspeed_version}: they came with 0.18.3",
    ),
    Rule(
        lambda c, k, s: c.optimizer in ONE_BIT_OPTIMIZERS and version(s.deepspeed_version) >= (0, 19, 7),
        "{optimizer} is not in DeepSpeed {deepspeed_version}: it was removed in 0.19.7",
    ),
    Rule(
        lambda c, k, s: c.optimizer in ONE_BIT_OPTIMIZERS and s.accelerator != "cuda",
        "{optimizer} communicates over NCCL or MPI only",
    ),
    Rule(lambda c, k, s: c.optimizer in ONE_BIT_OPTIMIZERS and c.zero_stage != 0, "{optimizer} needs ZeRO stage 0"),
    Rule(
        lambda c, k, s: c.optimizer in ONE_BIT_OPTIMIZERS and s.client_optimizer,
        "{optimizer}: the workload makes its own optimizer",
    ),
)


def _hpz(config: Mapping[str, Scalar]) -> int:
    value = config.get("zero_optimization.zero_hpz_partition_size")
    return value if isinstance(value, int) else 1
