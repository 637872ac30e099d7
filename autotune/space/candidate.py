"""One training configuration, and the DeepSpeed JSON that it means."""

import copy
import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from autotune.errors import nearest
from autotune.space import data, torch_settings
from autotune.space.deepspeed import (
    DEVICES,
    DTYPES,
    LARGEST_BATCH,
    OWNED_PATHS,
    PRECISIONS,
    RATE_KEYS,
    SECTION_KEYS,
    SECTIONS,
    STAGE_3_PREFIXES,
    TOP_LEVEL_KEYS,
    ZERO,
    ZERO_OPTIMIZERS,
    ConfigError,
    DsConfig,
    Scalar,
    at_path,
    check_path,
    check_plain,
    drop_path,
    is_int,
    precision_of,
    set_path,
    without_auto,
)
from autotune.space.degree import (
    DEGREES,
    EXPERT_DEGREE,
    EXPERTS_SPLIT,
    PIPELINE_DEGREE,
    SEQUENCE_DEGREE,
    TENSOR_DEGREE,
    configured_degrees,
    ranks_per_replica,
)
from autotune.space.ineffective import STAGES_1_AND_2
from autotune.space.retired import one_spelling, renamed

PRECISION_SECTIONS = (*DTYPES, "torch_autocast")
# The precision that computes in the same 16 bits and mixes types where an operation needs it.
AUTOCAST = {"bf16": "torch_autocast", "fp16": "torch_autocast_fp16"}
# How a candidate is described; a precision or device that is not here is its own word.
PRECISION_WORDS = {"torch_autocast": "bf16 autocast", "torch_autocast_fp16": "fp16 autocast"}
DEVICE_WORDS = {"cpu": "the host", "nvme": "NVMe"}
BATCH = ("micro_batch_size", "gradient_accumulation_steps")
# Settings of an offload that nothing reads where it goes to the host, so that they may be stated beside another device.
READ_FOR_NVME = "nvme_path buffer_count buffer_size max_in_cpu pipeline_read pipeline_write fast_init".split()
# What a sentence about a change calls a knob; a setting that is not here keeps its name.
LABELS = {
    **dict.fromkeys(BATCH, "micro-batch"), "zero_stage": "ZeRO", "checkpoint_every": "recomputation of",
    "offload_optimizer": "optimizer on", "offload_param": "parameters on",
}  # fmt: skip
# Name of the trial attribute that holds `Candidate.key`.
CANDIDATE_ATTR = "candidate"


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
        config: Further DeepSpeed settings as sorted (dotted path, value) pairs; a value of None leaves the key out.
            Paths that begin with `data.` are settings of the data and its loader, those with `torch.` of torch; DeepSpeed
            gets neither.
    """

    micro_batch_size: int
    gradient_accumulation_steps: int = 1
    zero_stage: int = 0
    precision: str = "fp32"
    checkpoint_every: int = 0
    offload_optimizer: str = "none"
    offload_param: str = "none"
    config: tuple[tuple[str, Scalar], ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Scalar]) -> "Candidate":
        """Builds a candidate from flat knob values; a name with a dot is a DeepSpeed path."""
        own: dict[str, Any] = {name: value for name, value in values.items() if name in FIELDS}
        config = {name: value for name, value in values.items() if name not in FIELDS and value is not None}
        config = {n: one_spelling(n, value) for n, value in config.items() if n not in DEGREES or value not in (0, 1)}
        for name, value in config.items():
            check_knob(name)
            if data.is_data(name) or torch_settings.is_torch(name):
                check_value(name, value)
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
    @functools.lru_cache(maxsize=20_000)  # every step of a study reads every trial
    def from_key(cls, key: str) -> "Candidate":
        """The candidate of a key."""
        return cls.of(json.loads(key))

    @property
    def tensor_degree(self) -> int:
        """Ranks over which the matrices of a layer are split."""
        return self.degree(TENSOR_DEGREE)

    @property
    def sequence_degree(self) -> int:
        """Ranks over which a sequence is split."""
        return self.degree(SEQUENCE_DEGREE)

    @property
    def pipeline_degree(self) -> int:
        """Stages of a pipeline, one on each rank of a group."""
        return self.degree(PIPELINE_DEGREE)

    @property
    def expert_degree(self) -> int:
        """Ranks over which the experts of a mixture are shared out; they train on samples of their own."""
        return self.degree(EXPERT_DEGREE)

    def degree(self, path: str) -> int:
        """Ranks of a group: the value at a path of `DEGREES`, 1 without."""
        found = next((value for name, value in self.config if name == path), None)
        return max(1, found) if isinstance(found, int) else 1

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that train on the same samples, as they share a copy of the model or a sequence."""
        return self.tensor_degree * self.sequence_degree * self.pipeline_degree

    @property
    def is_whole(self) -> bool:
        """Whether every rank has the whole model and other samples than the next."""
        return self.ranks_per_replica * self.expert_degree == 1

    @property
    def samples_per_rank(self) -> float:
        """Samples of an optimizer step for each rank, where ranks of one replica share theirs."""
        return self.micro_batch_size * self.gradient_accumulation_steps / self.ranks_per_replica

    def global_batch_size(self, world_size: int) -> int:
        """Samples per optimizer step.

        Args:
            world_size: Ranks; the candidate's own degrees are divided out.
        """
        return max(1, self.micro_batch_size * self.gradient_accumulation_steps * world_size // self.ranks_per_replica)

    def describe(self) -> str:
        """The candidate in words, `micro-batch 8 x 1, bf16, ZeRO 1`: the batch, and what differs from the defaults."""
        words = [
            f"micro-batch {self.micro_batch_size} x {self.gradient_accumulation_steps}",
            PRECISION_WORDS.get(self.precision, self.precision),
            f"ZeRO {self.zero_stage}",
        ]
        if self.checkpoint_every:
            words.append(f"{every_nth(self.checkpoint_every)} block recomputed")
        for what, device in (("optimizer", self.offload_optimizer), ("parameters", self.offload_param)):
            if device != "none":
                words.append(f"{what} on {DEVICE_WORDS[device]}")
        words += [f"{path.rsplit('.', 1)[-1]}={plain(value)}" for path, value in self.config]
        return ", ".join(words)

    def changes_from(self, other: "Candidate") -> list[str]:
        """The changes from another candidate in words, one each: `ZeRO 0 instead of 3`."""
        own, before = self.values(), other.values()
        said = list[str]()
        for name in differing(own, before):
            if name in BATCH and said and said[0].startswith("micro-batch"):
                continue
            now, then = (_change_words(name, candidate) for candidate in (self, other))
            said.append(f"{LABELS.get(name, name)} {now} instead of {then}")
        return said

    def to_deepspeed(self, base: Mapping[str, Any] | None = None) -> DsConfig:
        """The DeepSpeed configuration of this candidate over the user's own.

        The batch and the precision are replaced as groups; `zero_optimization` is merged, then keys that the stage
        does not know are dropped; everything else of the user's stays.

        Args:
            base: The user's DeepSpeed configuration; its values of "auto" are dropped, but for
                `data_types.buffer_dtype`, which then follows 16-bit weights: DeepSpeed keeps buffers in fp32 otherwise,
                and batch normalisation fails on the mixture.
        """
        config = renamed(without_auto(dict(base or {})))
        if self.precision in DTYPES and at_path(base or {}, "data_types.buffer_dtype") == "auto":
            set_path(config, "data_types.buffer_dtype", self.precision)
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            config.pop(key, None)
        config = {
            "train_micro_batch_size_per_gpu": self.micro_batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            **config,
        }
        _drop_degrees(config)
        self._set_precision(config)
        self._set_zero(config)
        for path, value in self.config:
            if not (data.is_data(path) or torch_settings.is_torch(path)):
                set_path(config, path, value)
        if self.expert_degree > 1:
            set_path(config, EXPERTS_SPLIT, True)
        return config

    def stated(self, config: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Scalar]:
        """The values that a user's configuration has at some paths, and that act with this candidate."""
        acting = self.to_deepspeed(config)
        found = {path: at_path(acting, path) for path in paths if path not in dict(self.config)}
        return {path: value for path, value in found.items() if isinstance(value, str | int | float)}

    def with_own(self, base: Mapping[str, Any]) -> DsConfig:
        """`base` with this candidate's DeepSpeed settings in it: the configuration that a baseline was read from."""
        config = copy.deepcopy(dict(base))
        for path, value in self.config:
            set_path(config, path, value)
        return config

    @property
    def data_changes(self) -> dict[str, Scalar]:
        """Its settings of the data, without their prefix."""
        return data.changes(dict(self.config))

    @property
    def other_numerics(self) -> dict[str, Scalar]:
        """Its settings that change training besides its `ds_config`, and its learning rates, which that states scaled to the batch."""
        own = dict(self.config)
        rates = {name: value for name, value in own.items() if name.rpartition(".")[2] in RATE_KEYS}
        return data.retraining(own) | torch_settings.numerics(own) | rates

    def _set_precision(self, config: DsConfig) -> None:
        kept = {name: config.pop(name, {}) for name in (*PRECISION_SECTIONS, "amp")}
        # A section that the user states stays, as scripts read it; newer releases of DeepSpeed refuse amp's.
        config |= {name: {"enabled": False} for name in PRECISION_SECTIONS if "enabled" in kept[name]}
        if self.precision in DTYPES:
            config[self.precision] = {**kept[self.precision], "enabled": True}
        elif self.precision.startswith("torch_autocast"):
            dtype = "float16" if self.precision.endswith("fp16") else "bfloat16"
            config["torch_autocast"] = {**kept["torch_autocast"], "enabled": True, "dtype": dtype}
        types = config.pop("data_types", {})
        unfit = set() if self.precision in DTYPES else {"grad_accum_dtype"}
        if types.get("param_dtype") != self.precision:  # DeepSpeed refuses it beside another precision
            unfit.add("param_dtype")
        if left := {key: value for key, value in types.items() if key not in unfit}:
            config["data_types"] = left

    def _set_zero(self, config: DsConfig) -> None:
        zero = config.pop("zero_optimization", {})
        if self.zero_stage == 0:
            if "stage" in zero:  # scripts read this, too
                config["zero_optimization"] = {"stage": 0}
            return
        if self.zero_stage == 3:  # where `compute_grad_norm: false` is refused
            zero = {key: value for key, value in zero.items() if ZERO + key not in STAGES_1_AND_2}
        else:
            zero = {key: value for key, value in zero.items() if not key.startswith(STAGE_3_PREFIXES)}
        for section, device in (("offload_optimizer", self.offload_optimizer), ("offload_param", self.offload_param)):
            kept = zero.pop(section, None) or {}
            if device != "none":
                of_nvme = {key: kept[key] for key in kept if key in READ_FOR_NVME} if device == "nvme" else {}
                zero[section] = {**(kept if kept.get("device") == device else of_nvme), "device": device}
                if self.zero_stage < 3:  # where another one than 1 is refused
                    zero[section].pop("ratio", None)
        config["zero_optimization"] = {"stage": self.zero_stage, **{k: v for k, v in zero.items() if k != "stage"}}
        # An optimizer that DeepSpeed has not tested itself is refused under ZeRO without this, also one that the JSON names.
        if str((config.get("optimizer") or {}).get("type", "")).lower() not in ZERO_OPTIMIZERS:
            config["zero_allow_untested_optimizer"] = True
        if "optimizer" not in config and self.offload_optimizer != "none":
            config["zero_force_ds_cpu_optimizer"] = False


def _drop_degrees(config: DsConfig) -> None:
    """Removes the user's degrees, which candidates carry themselves; settings beside them stay."""
    switched = (EXPERTS_SPLIT,) if EXPERT_DEGREE in configured_degrees(lambda path: at_path(config, path)) else ()
    for path in (*DEGREES, *switched):
        drop_path(config, path)


FIELDS = tuple(field.name for field in fields(Candidate) if field.name != "config")
CHOICES: dict[str, tuple[Scalar, ...]] = {
    "zero_stage": (0, 1, 2, 3),
    "precision": PRECISIONS,
    "offload_optimizer": DEVICES,
    "offload_param": DEVICES,
}
AT_LEAST = {"micro_batch_size": 1, "gradient_accumulation_steps": 1, "checkpoint_every": 0}


def _change_words(name: str, candidate: Candidate) -> str:
    """The value of a knob in a sentence about a change; the batch is one."""
    value = candidate.values().get(name)
    if name in BATCH:
        return f"{candidate.micro_batch_size} x {candidate.gradient_accumulation_steps}"
    if name == "precision":
        return PRECISION_WORDS.get(candidate.precision, candidate.precision)
    if name == "checkpoint_every":
        return f"{every_nth(int(value))} block" if value else "no block"
    if name in ("offload_optimizer", "offload_param"):
        return "the device" if value == "none" else DEVICE_WORDS[str(value)]
    if name.startswith("data."):
        return "your own" if value is None else plain(value)
    default = "torch's default" if torch_settings.is_torch(name) else "DeepSpeed's default"
    return default if value is None else plain(value)


def plain(value: Scalar) -> str:
    """A knob's value as JSON writes it, text without quotation marks."""
    return value if isinstance(value, str) else json.dumps(value)


def every_nth(number: int) -> str:
    """Every n-th of something in words: `every`, `every 2nd`."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return "every" if number == 1 else f"every {number}{ending}"


def check_knob(name: str) -> None:
    """Refuses a knob that is neither a Candidate field nor a path that DeepSpeed reads."""
    if name in FIELDS:
        return
    if data.is_data(name):
        data.check_knob(name)
        return
    if torch_settings.is_torch(name):
        torch_settings.check_knob(name)
        return
    if name in OWNED_PATHS:
        raise ConfigError(f"knob {name!r}: use {OWNED_PATHS[name]!r} instead")
    if name in SECTIONS:
        example = f", as in `{name}.{min(SECTION_KEYS[name])}`" if name in SECTION_KEYS else ""
        raise ConfigError(f"{name}: is a section of settings; name one of them{example}")
    if "." not in name and name not in TOP_LEVEL_KEYS:
        raise ConfigError(
            f"unknown knob {name!r}.{nearest(name, [*FIELDS, *TOP_LEVEL_KEYS])} Known: {', '.join(FIELDS)},"
            " or a DeepSpeed path with dots"
        )
    check_path(name)


def check_value(name: str, value: Scalar) -> None:
    """Refuses a value that the Candidate field does not take."""
    check_plain(value, name)
    if data.is_data(name):
        data.check_value(name, value)
    elif torch_settings.is_torch(name):
        torch_settings.check_value(name, value)
    elif name in CHOICES:
        if value not in CHOICES[name] or isinstance(value, bool | float):
            raise ConfigError(f"{name}: {value!r} is not one of {', '.join(map(str, CHOICES[name]))}")
    elif name in AT_LEAST:
        if not is_int(value) or value < AT_LEAST[name]:
            raise ConfigError(f"{name}: {value!r} is not a whole number of at least {AT_LEAST[name]}")
        if value > LARGEST_BATCH:
            raise ConfigError(f"{name}: {value!r} is more than {LARGEST_BATCH:,}")


def from_deepspeed(config: Mapping[str, Any], world_size: int) -> Candidate:
    """The candidate that a DeepSpeed configuration means, as DeepSpeed itself resolves it.

    Of batch, micro-batch and accumulation any two give the third (deepspeed/runtime/config.py,
    `_set_batch_related_parameters`).

    Raises:
        ConfigError: The batch sizes are missing, contradictory or do not divide by the ranks.
    """
    config = renamed(without_auto(dict(config)))
    degrees = configured_degrees(lambda path: at_path(config, path))
    micro, steps = _batch(config, max(1, world_size // ranks_per_replica(degrees)))
    zero = config.get("zero_optimization", {})
    values: dict[str, Scalar] = {
        "micro_batch_size": micro,
        "gradient_accumulation_steps": steps,
        "zero_stage": zero.get("stage", 0),
        "precision": precision_of(config),
        "offload_optimizer": _device(zero, "offload_optimizer"),
        "offload_param": _device(zero, "offload_param"),
        **degrees,
    }
    try:
        return Candidate.of(values)
    except ConfigError as error:
        raise ConfigError(f"base config: {error}") from None


def _batch(config: Mapping[str, Any], world_size: int) -> tuple[int, int]:
    total, micro, steps = (
        _count(config, key)
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    if micro is None:
        if total is None:
            raise ConfigError(
                "base config: train_micro_batch_size_per_gpu is missing (or train_batch_size); DeepSpeed needs one of them"
            )
        micro = total // world_size // (steps or 1)
    if steps is None:
        steps = total // (micro * world_size) if total is not None and micro else 1
    if total is not None and total != micro * steps * world_size:
        stated = (("train_micro_batch_size_per_gpu", "micro-batch"), ("gradient_accumulation_steps", "accumulation"))
        parts = [f"{name} {config[key]}" for key, name in stated if config.get(key) is not None]
        said = "is not" if len(parts) == len(stated) else "is no multiple of"
        raise ConfigError(
            f"base config: train_batch_size {total} {said} {' x '.join([*parts, f'{world_size} ranks'])};"
            " change it or pass --ranks"
        )
    return micro, steps


def _count(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is None or (is_int(value) and 1 <= value <= LARGEST_BATCH):
        return value
    raise ConfigError(
        f"base config: {key}: {value!r} is not a whole number of at least 1 (and at most {LARGEST_BATCH:,})"
    )


def _device(zero: Mapping[str, Any], section: str) -> str:
    kept = zero.get(section)
    return str(kept.get("device", "none")) if isinstance(kept, dict) else "none"


def differing(own: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The knobs in which two candidates' values differ."""
    return [name for name in dict.fromkeys([*own, *other]) if own.get(name) != other.get(name)]
