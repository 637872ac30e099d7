"""The user's DeepSpeed JSON: reading it, and refusing keys and values that DeepSpeed ignores or refuses."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeGuard

from autotune.errors import UserError, nearest
from autotune.space import installed
from autotune.space.degree import DEGREES, is_degree
from autotune.space.retired import SPELLINGS, TYPES, renamed

Scalar: TypeAlias = str | int | float | bool | None
DsConfig: TypeAlias = dict[str, Any]

PRECISIONS = ("fp32", "bf16", "fp16", "torch_autocast", "torch_autocast_fp16")
DTYPES = ("bf16", "fp16")
DEVICES = ("none", "cpu", "nvme")
# Where the optimizer and its schedulers state learning rates.
RATE_KEYS = ("lr", "warmup_min_lr", "warmup_max_lr", "cycle_min_lr", "cycle_max_lr", "lr_range_test_min_lr")
# The section of ZeRO's settings, as their paths begin.
ZERO = "zero_optimization."
# Stages that keep the gradients of one alone of several backward passes at a boundary of accumulation, and since which release.
LOSSY_STAGES, LOSSY_SINCE = (1, 2), (0, 17, 6)

# Top-level keys that DeepSpeed once read and refuses since `RETIRED_SINCE` (`_REMOVED_TOP_LEVEL_CONFIG_KEYS`).
RETIRED_SINCE = (0, 19, 8)
RETIRED_KEYS = frozenset(
    """
    elasticity sparse_gradients amp curriculum_learning compression_training eigenvalue progressive_layer_drop
    sparse_attention graph_harvesting nebula
    """.split()
)
# Top-level keys that DeepSpeed reads (deepspeed/runtime/config.py and the config classes it builds, 0.15 to 0.19).
# DeepSpeed ignores any other top-level key silently, so a typo there would be tuned and exported without effect.
TOP_LEVEL_KEYS = RETIRED_KEYS | frozenset(
    """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation optimizer
    scheduler fp16 bf16 torch_autocast zero_optimization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    communication_data_type seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor
    gradient_allreduce_op gradient_clipping data_types steps_per_print wall_clock_breakdown memory_breakdown dump_state
    disable_allgather disable_python_gc activation_checkpointing flops_profiler comms_logger tensorboard wandb comet
    csv_monitor monitor_config aio pipeline checkpoint data_efficiency hybrid_engine autotuning dataloader_drop_last
    log_level datastates_ckpt compile timers tensor_parallel expert_parallel sequence_parallel_size
    use_data_before_expert_parallelism weight_quantization vocabulary_size train_seq_parallel inference
    """.split()
)
# Keys of the sections that DeepSpeed validates strictly, or reads without a word about others; other sections pass unchecked.
SECTION_KEYS: dict[str, frozenset[str]] = {
    section: frozenset(keys.split())
    for section, keys in {
        "zero_optimization": """
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
        """,
        "bf16": """
            enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states
        """,
        "fp16": """
            enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis
            min_loss_scale fp16_master_weights_and_grads
        """,
        "torch_autocast": "enabled dtype lower_precision_safe_modules",
        "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
        "optimizer": "type params legacy_fusion",
        "timers": "throughput",
        "timers.throughput": "enabled synchronized",
        "scheduler": "type params",
        "activation_checkpointing": """
            partition_activations contiguous_memory_optimization cpu_checkpointing number_checkpoints profile
            synchronize_checkpoint_boundary
        """,
        "aio": "block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events use_gds",
        "zero_optimization.offload_optimizer": """
            device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio super_offload
            cpuadam_cores_perc pipeline
        """,
        "zero_optimization.leaf_module": "classes names name_suffixes",
        "zero_optimization.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
    }.items()
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
    "optimizer.type": "base_config",
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
TOO_DEEP = f"it is nested more than {DEEPEST} deep, as no DeepSpeed configuration is"
STAGE_3_PREFIXES = tuple(
    "stage3_ zero_hpz zero_quantized offload_param cpu_offload_param leaf_module mics_ zeropp_".split()
)


class ConfigError(UserError):
    """A DeepSpeed configuration or a candidate that cannot be read."""


def is_int(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_path(path: str) -> None:
    """Refuses a DeepSpeed path whose section or key DeepSpeed does not read."""
    names = path.split(".")
    if "" in names:
        raise ConfigError(f"{path!r}: a path is names with one dot between them, as in zero_optimization.overlap_comm")
    _check_keys(names[0], names[1:2], f" (in {path!r})")
    _check_section(".".join(names[:2]), names[2:3], f" (in {path!r})")


def _check_keys(section: str, keys: Iterable[str], place: str = "") -> None:
    """Refuses a top-level key, or keys of its section, that DeepSpeed does not read."""
    if section not in TOP_LEVEL_KEYS:
        raise ConfigError(f"DeepSpeed has no key {section!r}{place}.{nearest(section, TOP_LEVEL_KEYS)}")
    _check_section(section, keys, place)


def _check_section(section: str, keys: Iterable[str], place: str = "") -> None:
    """Refuses keys of a section, or of one within it, that DeepSpeed does not read."""
    known = SECTION_KEYS.get(section, frozenset())
    for key in keys:
        if known and key not in known:
            raise ConfigError(f"DeepSpeed's {section!r} has no key {key!r}{place}.{nearest(key, known)}")


def set_path(config: DsConfig, path: str, value: Any) -> None:
    """Sets a dotted path in a nested configuration, making the sections on the way."""
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


def drop_path(config: DsConfig, path: str) -> None:
    """Removes a dotted path from a configuration, and a section that it leaves empty; sections that others share stay."""
    section, _, rest = path.partition(".")
    if not rest:
        config.pop(section, None)
    elif isinstance(config.get(section), dict):
        config[section] = dict(config[section])
        drop_path(config[section], rest)
        if not config[section]:
            del config[section]


def check_retired(config: Mapping[str, Any], deepspeed_version: str) -> None:
    """Refuses a key that the installed DeepSpeed no longer takes."""
    for key in RETIRED_KEYS & config.keys():
        if version(deepspeed_version) >= RETIRED_SINCE:
            raise ConfigError(f"base config: {key!r} is no longer read by DeepSpeed {deepspeed_version}; remove it")


def without_auto(config: DsConfig) -> DsConfig:
    """The configuration without "auto", which Hugging Face fills in, and without null, which DeepSpeed refuses for most settings.

    A section left empty goes with them, but for `params`: DeepSpeed builds no scheduler without.
    """
    kept: DsConfig = {}
    for key, value in config.items():
        if isinstance(value, dict):
            inner = without_auto(value)
            if inner or not value or key == "params":
                kept[key] = inner
        elif value not in ("auto", None):
            kept[key] = value
    return kept


def check_plain(value: Any, where: str, depth: int = 0) -> None:
    """Refuses what JSON or a database cannot hold: infinities, lone surrogates, keys that are no texts, deep nesting."""
    match value:
        case None | bool():
            return
        case int() if abs(value) > LARGEST:
            problem = f"a whole number of {value.bit_length()} bits is more than any setting takes"
        case float() if not math.isfinite(value):
            problem = f"{value} is no number that can be used; give one, or leave the key out"
        case str() if not _is_text(value):
            problem = f"{value[:60]!r} holds a character that is none; write plain text"
        case int() | float() | str():
            return
        case dict() | list() | tuple() if depth >= DEEPEST:
            raise ConfigError(f"{where[:200]}: {TOO_DEEP}")
        case dict():
            for key, inner in value.items():
                if not (isinstance(key, str) and _is_text(key)):
                    raise ConfigError(f"{where}: {key!r} is no name of a setting; put a name in quotation marks")
                check_plain(inner, f"{where}: {key[:60]}", depth + 1)
            return
        case list() | tuple():
            for inner in value:
                check_plain(inner, where, depth + 1)
            return
        case _:
            problem = f"{value!r} is no plain value; give a text, a number, true or false"
    raise ConfigError(f"{where}: {problem}")


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


# Optimizers of the JSON that ZeRO takes without being asked to.
ZERO_OPTIMIZERS = frozenset("adam adamw adagrad lion muon".split())
# Compiled ops of DeepSpeed's optimizers: on the device, and on the host if the optimizer is offloaded.
_OPTIMIZER_OPS = {
    "adam": ("fused_adam", "cpu_adam"), "adamw": ("fused_adam", "cpu_adam"), "lamb": ("fused_lamb", "fused_lamb"),
    "lion": ("fused_lion", "cpu_lion"), "adagrad": ("", "cpu_adagrad"),
}  # fmt: skip


def ops_needed(value_at: Callable[[str], Any]) -> list[str]:
    """Returns DeepSpeed's compiled ops that a configuration calls for, by builder name.

    Args:
        value_at: Returns the configuration's value at a dotted path, None where there is none.
    """
    kind = str(value_at("optimizer.type") or "").lower()
    moved = [value_at(f"{ZERO}offload_{what}.device") for what in ("optimizer", "param")]
    own = not (kind in ("adam", "adamw") and value_at("optimizer.params.torch_adam"))
    found = [_OPTIMIZER_OPS.get(kind, ("", ""))[moved[0] in ("cpu", "nvme")]] if own else []
    quantised = any(value_at(f"{ZERO}zero_quantized_{x}") for x in ("weights", "gradients", "nontrainable_weights"))
    found += ["async_io"] * ("nvme" in moved) + ["quantizer"] * quantised
    return list(filter(None, found))


def precision_of(config: Mapping[str, Any]) -> str:
    """The precision that a DeepSpeed configuration means, one of `PRECISIONS`."""
    config = renamed(dict(config))
    for precision in ("bf16", "fp16"):
        if config.get(precision, {}).get("enabled"):
            return precision
    autocast = config.get("torch_autocast", {})
    if autocast.get("enabled"):
        return "torch_autocast_fp16" if autocast.get("dtype") == "fp16" else "torch_autocast"
    return "fp32"


def version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparison: 0.19.8+cu12 -> (0, 19, 8)."""
    numbers = []
    for part in text.split("+", maxsplit=1)[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


# Settings that the tuner itself calculates with or compares, and what DeepSpeed takes for them beside "auto".
_SWITCH, _NUMBER, _TEXT = (bool,), (int, float), (str,)
KINDS: dict[tuple[type, ...], tuple[str, str]] = {
    _SWITCH: ("true or false", """
        bf16.enabled fp16.enabled torch_autocast.enabled bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states
        zero_optimization.overlap_comm zero_optimization.contiguous_gradients prescale_gradients disable_allgather
        wall_clock_breakdown memory_breakdown dump_state dataloader_drop_last zero_allow_untested_optimizer
        zero_force_ds_cpu_optimizer fp16.fp16_master_weights_and_grads zero_optimization.zero_quantized_weights
        zero_optimization.zero_quantized_gradients
    """),
    _NUMBER: ("a number", """
        zero_optimization.reduce_bucket_size zero_optimization.allgather_bucket_size gradient_clipping
        zero_optimization.stage3_prefetch_bucket_size zero_optimization.stage3_param_persistence_threshold
        zero_optimization.stage3_max_live_parameters zero_optimization.stage3_max_reuse_distance
        zero_optimization.zero_hpz_partition_size gradient_predivide_factor steps_per_print
    """),
    _TEXT: ("a text", """
        optimizer.type scheduler.type torch_autocast.dtype data_types.grad_accum_dtype data_types.buffer_dtype
        data_types.param_dtype communication_data_type seq_parallel_communication_data_type
        zero_optimization.offload_optimizer.device zero_optimization.offload_optimizer.nvme_path
        zero_optimization.offload_param.device zero_optimization.offload_param.nvme_path
    """),
}  # fmt: skip
_KIND_OF: dict[str, tuple[str, tuple[type, ...]]] = {
    path: (words, kinds) for kinds, (words, paths) in KINDS.items() for path in paths.split()
}
# Texts that DeepSpeed looks up in a list of names, and whether it takes them in lower case, too.
WIRE_TYPES = frozenset(("fp32", "fp16", "bf16"))
NAMES: dict[str, tuple[Callable[[], frozenset[str]], bool]] = {
    "optimizer.type": (installed.optimizers, True),
    "scheduler.type": (installed.schedulers, False),
    **{
        path: (lambda: WIRE_TYPES, True) if wire else (lambda: frozenset(SPELLINGS), False)
        for path, wire in TYPES.items()
    },
}
SECTIONS = (*SECTION_KEYS, "optimizer.params", "scheduler.params", "pipeline", "autotuning")


def read_config(text: str, where: str) -> DsConfig:
    """Reads a DeepSpeed JSON and checks its keys.

    Args:
        where: What to call it in an error, usually its path.

    Raises:
        ConfigError: Not JSON, not an object, or a key that DeepSpeed does not read.
    """
    try:
        config = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number, parse_int=_whole)
    except json.JSONDecodeError as error:
        said = (
            f"{error.msg} at line {error.lineno}, column {error.colno}{_json_hint(text, error.pos)}"
            if text.strip()
            else "it is empty"
        )
        raise ConfigError(f"{where}: not JSON: {said}") from None
    except RecursionError:
        raise ConfigError(f"{where}: {TOO_DEEP}") from None
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    check_config(config, where)
    return dict(config)


def check_config(config: Any, where: str) -> None:
    """Refuses a DeepSpeed configuration with a key that DeepSpeed ignores, or a value that it refuses."""
    if not isinstance(config, dict):
        raise ConfigError(f"{where}: a DeepSpeed configuration is a JSON object, not {type(config).__name__}")
    check_plain(config, where)
    config = renamed(config)
    for path in SECTIONS:
        value = at_path(config, path)
        if not isinstance(value, dict) and (path in config or value not in (None, "auto")):
            raise ConfigError(f"{where}: {path!r} is a section (a JSON object), not {value!r}")
    for section, value in config.items():
        try:
            _check_keys(section, value if isinstance(value, dict) else ())
            for key, inner in value.items() if isinstance(value, dict) else ():
                _check_section(f"{section}.{key}", inner if isinstance(inner, dict) else ())
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    for path in {**_KIND_OF, **installed.bounds(), **installed.kinds(), **dict.fromkeys(DEGREES)}:
        if (value := at_path(config, path)) != "auto":
            check_setting(path, value, f"{where}: {path}")
    if (stage := at_path(config, "zero_optimization.stage")) not in (None, "auto", 0, 1, 2, 3):
        raise ConfigError(f"{where}: zero_optimization.stage: {stage!r} is not one of 0, 1, 2, 3")
    if all(at_path(config, f"{name}.enabled") is True for name in DTYPES):
        raise ConfigError(
            f"{where}: bf16.enabled and fp16.enabled are both true; a model trains in one type: leave out one"
        )


def check_setting(path: str, value: Any, where: str) -> None:
    """Refuses a value that DeepSpeed does not take for a setting; None is its default.

    Kinds are those of the settings that the tuner calculates with; names and bounds are the installed DeepSpeed's.
    """
    if value is None:
        return
    if path in DEGREES and not is_degree(value):
        raise ConfigError(f"{where}: {value!r} is no degree: a whole number of ranks, 1 (or null) for none")
    words, kinds = _KIND_OF.get(path, ("", (object,)))
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is _NUMBER):
        raise ConfigError(f"{where}: {words} is needed, not {value!r}")
    if needed := installed.needed_instead(path, value):
        raise ConfigError(f"{where}: {needed} is needed, not {value!r}")
    if isinstance(value, int | float):
        for sign, bound in installed.bounds().get(path, {}).items():
            if not installed.COMPARE[sign](value, bound):
                raise ConfigError(f"{where}: {value!r} is not {installed.SIGNS[sign]} {bound:g}")
    if path in NAMES and isinstance(value, str):
        names, any_case = NAMES[path]
        known = names()
        if known and value not in known and not (any_case and value.lower() in known):
            hint = nearest(value, sorted(known))
            raise ConfigError(
                f"{where}: DeepSpeed knows no {value!r}.{hint} Known: {', '.join(sorted(known, key=str.lower))}"
            )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; DeepSpeed refuses a key that is there twice, too."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key[:60]!r} is there twice; remove one of them")
        found[key] = value
    return found


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON; give one, or leave the key out")


def _whole(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError(f"{digits[:20]}... has {len(digits)} digits, which no setting takes")
    return int(digits)


def _json_hint(text: str, at: int) -> str:
    """What a person usually did where JSON ends to be JSON."""
    rest, before = text[at : at + 5], text[:at].rstrip()
    if rest[:1] in ("#", "/"):
        return "; JSON has no comments: remove it"
    if rest[:1] == "," or (before.endswith(",") and rest[:1] in ("}", "]", "")):
        return "; remove the comma before the end"
    if rest[:1] == "'":
        return "; texts take double quotation marks"
    if rest.startswith(("True", "False", "None")):
        return "; JSON writes true, false and null"
    return ""
