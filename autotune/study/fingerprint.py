"""Fingerprint of what a study's answer depends on (device, libraries, model, data, ranks, space) and its changes."""

import copy
import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from autotune.space.candidate import PRECISION_SECTIONS, differing
from autotune.space.deepspeed import DsConfig, Scalar, drop_path
from autotune.space.degree import EXPERTS_SPLIT
from autotune.space.parameter import Parameter
from autotune.space.retired import renamed
from autotune.space.space import SearchSpace
from autotune.study.setup.plan import Plan, target_digest
from autotune.study.spec.yaml_file import elsewhere
from autotune.study.storage.records import StudyRecord
from autotune.system import device
from autotune.system.machine import n_cores, processor_name
from autotune.system.units import format_bytes
from autotune.trial.lengths import shares
from autotune.trial.workload import DataShape, Workload

# Share of samples in another class of lengths from which the lengths count as changed.
LENGTHS_MOVED = 0.1
# Share by which memory, which a machine reports slightly differently from boot to boot, and data sets may grow and count as the same.
SIZE_MOVED = 0.02
# Of fewer samples than this, sizes may have been alike by chance.
ENOUGH_SAMPLES = 100
BATCH = ("micro_batch_size", "gradient_accumulation_steps")
SHARDING = ("zero_stage", "zero_optimization.", "offload_", "communication_data_type")
NUMERICS = ("precision", "bf16.", "fp16.", "data_types.", "torch_autocast.")
MEMORY = (*BATCH, *SHARDING, *NUMERICS, "checkpoint_every")
EVERYTHING = ("",)
# Sections and settings of a DeepSpeed configuration that candidates change, or that change no time.
OF_CANDIDATES = (
    "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_optimization", *PRECISION_SECTIONS, "amp", "data_types",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "pipeline.activation_checkpoint_interval",
    "pipeline.use_reentrant", EXPERTS_SPLIT, "scheduler", "optimizer.params.lr",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the fingerprint.

    Attributes:
        touches: Prefixes of the knobs whose best value may change with it.
        opens: Whether a change alters which configurations can run, so that a better one may exist.
    """

    label: str
    touches: tuple[str, ...] = EVERYTHING
    opens: bool = False
    differs: Callable[[Any, Any], bool] = lambda old, new: bool(old != new)


def _lengths_differ(old: Mapping[str, float], new: Mapping[str, float]) -> bool:
    """Total variation distance of two histograms."""
    return sum(abs(old.get(edge, 0.0) - new.get(edge, 0.0)) for edge in {*old, *new}) / 2 > LENGTHS_MOVED


def _size_differs(old: float, new: float) -> bool:
    return abs(new - old) > SIZE_MOVED * max(old, new)


def _version_differs(old: str, new: str) -> bool:
    """Builds of one version, as 0.19.8+cu12, name it differently from place to place."""
    return old.partition("+")[0] != new.partition("+")[0]


# In the order in which changes are printed.
PARTS: dict[str, Part] = {
    "accelerator": Part(label="accelerator", opens=True),
    "device": Part(label="device", opens=True),
    "devices": Part(label="number of devices"),
    "cores": Part(label="processor cores"),
    "threads": Part(label="OMP_NUM_THREADS"),
    "memory limit": Part(label="device memory or its limit", touches=MEMORY, opens=True, differs=_size_differs),
    "bf16": Part(label="bfloat16 support", touches=MEMORY, opens=True),
    "fp16": Part(label="fp16 support", touches=MEMORY, opens=True),
    "driver": Part(label="device driver"),
    "cuda": Part(label="CUDA"),
    "rocm": Part(label="ROCm"),
    "nccl": Part(label="NCCL", touches=(*SHARDING, *BATCH)),
    "torch": Part(label="torch", differs=_version_differs),
    "deepspeed": Part(label="DeepSpeed", touches=(*SHARDING, *NUMERICS, *BATCH), differs=_version_differs),
    "python": Part(label="Python", touches=()),
    "ranks": Part(label="ranks", touches=(*BATCH, *SHARDING, "checkpoint_every"), opens=True),
    "model": Part(label="structure of the model", opens=True),
    "parameters": Part(label="parameters", opens=True),
    "samples": Part(label="shape of the samples", opens=True),
    "data size": Part(label="samples in the data set", touches=BATCH, differs=_size_differs),
    "lengths": Part(label="lengths of the samples", touches=MEMORY, differs=_lengths_differ),
    "optimizer": Part(label="optimizer of the target", opens=True),
    "learning rate": Part(label="learning rate of the target", touches=BATCH),
    "space": Part(label="search space", opens=True),
    "objectives": Part(label="objectives", opens=True),
    "base configuration": Part(label="the baseline's configuration", opens=True),
    "target": Part(label="text of the target", touches=()),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Change:
    """A part of the fingerprint that has changed.

    Attributes:
        part: Its key in `PARTS`.
    """

    part: str
    before: Any
    after: Any

    @property
    def words(self) -> str:
        """The change for people."""
        label = PARTS[self.part].label
        match self.part:
            case "target" if self.after is None:
                return "the target's file is gone"
            case "model" | "target":
                return f"{label} has changed"
            case "space":
                return f"{label}: {_space_words(self.before, self.after)}"
            case "lengths":
                return f"{label}: {_lengths_words(self.before)}, now {_lengths_words(self.after)}"
            case "memory limit":
                return f"{label}: {format_bytes(self.before)}, now {format_bytes(self.after)}"
            case "objectives":
                return f"{label}: {', '.join(differing(self.before, self.after))} changed"
            case "base configuration":
                return f"{label}: {_settings_words(_flat(self.before), _flat(self.after))}"
        return f"{label}: {_said(self.before)}, now {_said(self.after)}"

    @property
    def named(self) -> str:
        """What has changed, in a list, with both values where these are short."""
        label = PARTS[self.part].label
        return label if self.part == "model" else f"{label} ({_said(self.after)} instead of {_said(self.before)})"


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What the answer of a study depends on, as plain data by key of `PARTS`; unknown parts are missing."""

    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, kept: StudyRecord) -> "Fingerprint":
        """The fingerprint when the study began."""
        return cls(values=_plain(_known(kept.workload, kept.world_size, kept.fingerprint)))

    @classmethod
    def now(cls, found: Plan) -> "Fingerprint":
        """The fingerprint of the same target on this machine now."""
        return cls(values=_plain(_known(found.workload, found.world_size, _plain(found.fingerprint))))

    def digest(self, found: Plan) -> str:
        """A digest of the fingerprint and of all else that must be equal where a search goes on."""
        text = json.dumps([self.values, found.fingerprint], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def changes(before: Fingerprint, after: Fingerprint) -> list[Change]:
    """The parts, known in both fingerprints, that differ."""
    old, new = before.values, after.values
    found = [
        Change(part=name, before=old[name], after=new[name])
        for name, part in PARTS.items()
        if name in old and name in new and part.differs(old[name], new[name])
    ]
    # A changed text is irrelevant where the model itself was compared.
    return [change for change in found if change.part != "target" or "model" not in new]


def touched(found: Iterable[Change]) -> tuple[str, ...] | None:
    """Prefixes of the knobs that changes may move; None for all knobs."""
    names = dict.fromkeys(name for change in found for name in PARTS[change.part].touches)
    return None if "" in names or not names else tuple(names)


def opened(found: Iterable[Change]) -> bool:
    """Whether a change alters which configurations can run."""
    return any(PARTS[change.part].opens for change in found)


def narrowed(space: SearchSpace, names: tuple[str, ...] | None, known: Iterable[Mapping[str, Scalar]]) -> SearchSpace:
    """A space in which knobs that no change touches keep only values of good configurations.

    Args:
        space: The whole space.
        names: Prefixes of the knobs that the changes touch; None if they touch all, which leaves the space as it is.
        known: Good configurations, as flat values.
    """
    if names is None:
        return space
    good = list(known)
    kept = []
    for parameter in space.parameters:
        values = [value for value in parameter.all_values() if any(each.get(parameter.name) == value for each in good)]
        free = parameter.name.startswith(names) or not values
        kept.append(parameter if free else Parameter(name=parameter.name, choices=tuple(values), when=parameter.when))
    return SearchSpace(parameters=tuple(kept), samples_per_rank=space.samples_per_rank)


def here(kept: StudyRecord, target: Path, folder: Path) -> Fingerprint:
    """The parts of a study's fingerprint that need neither torch nor the model; the target's file may be gone.

    Where the study ran on an engine's machines, a hostfile's, or on several, this one may only start its trials, and is not compared.

    Args:
        folder: The study's.
    """
    values: dict[str, Any] = {name: metadata.version(name) for name in ("torch", "deepspeed")}
    values["python"] = platform.python_version()
    # What the launch command sets, as `deepspeed --num_gpus` does CUDA_VISIBLE_DEVICES, trials see and this process does not.
    variables = os.environ | (kept.invocation.fixed_environment if kept.invocation else {})
    if threads := variables.get("OMP_NUM_THREADS"):
        values["threads"] = threads
    if not (kept.fingerprint.keys() & {"executor", "nodes"} or elsewhere(folder)):
        values |= _machine(variables, on_cpu=Fingerprint.of(kept).values.get("accelerator") == "cpu")
    values["target"] = target_digest(target) if target.is_file() else None
    return Fingerprint(values=values)


def _machine(variables: Mapping[str, str], *, on_cpu: bool) -> dict[str, Any]:
    """The parts of this machine; `on_cpu` says that the processor is what compares with the study's device."""
    found = device.here(variables)
    values: dict[str, Any] = {"cores": n_cores(), "accelerator": found.accelerator}
    if found.each:
        values |= {"device": found.each[0].name, "devices": len(found.each)}
        values |= {"driver": found.driver} if found.driver else {}
    elif on_cpu:
        values["device"] = processor_name()
    return values


def _known(workload: Workload, world_size: int, asked: Mapping[str, Any]) -> dict[str, Any]:
    environment = workload.environment
    values: dict[str, Any] = {
        "accelerator": environment.accelerator,
        "device": environment.device_name,
        "devices": environment.n_devices,
        "memory limit": asked.get("device_memory_bytes") or environment.device_memory_bytes,
        "bf16": environment.bf16,
        "fp16": environment.fp16,
        "ranks": world_size,
        "parameters": workload.n_parameters,
        "data size": workload.n_samples,
        "space": asked.get("space"),
        "objectives": {each["name"]: _stated(each) for each in asked.get("objectives") or ()},
        "base configuration": _base_config(asked),
        "target": asked.get("target"),
    } | {name: value for name, value in environment.versions.items() if name in PARTS}
    if environment.accelerator == "cpu":
        values["cores"] = environment.n_cores
        values["threads"] = environment.omp_num_threads
    if workload.structure:
        values["model"] = workload.structure
    if workload.client_optimizer and workload.optimizer:
        values["optimizer"] = workload.optimizer
    if rates := (workload.script.learning_rates if workload.script else workload.learning_rates):
        values["learning rate"] = list(rates)
    if workload.data is not None:
        lengths = {str(edge): share for edge, share in shares(workload.data.table).items()}
        values |= {"samples": _comparable(workload, workload.data), "lengths": lengths}
    return {name: value for name, value in values.items() if value is not None or name == "threads"}


def _comparable(workload: Workload, data: DataShape) -> list[str]:
    """The tensors of a sample as any run of the same target finds them: without sizes where only a few samples or batches were seen."""
    surely = workload.script is None and data.n_seen >= min(ENOUGH_SAMPLES, data.n_samples or ENOUGH_SAMPLES)
    return [field if surely else field.partition("[")[0] for field in data.fields]


def _base_config(asked: Mapping[str, Any]) -> DsConfig:
    """The baseline's configuration; of a script, whose file may have changed, as far as no candidate changes it.

    To put the answer into that file changes no reason for the answer.
    """
    script = asked.get("script") or {}
    config: DsConfig = copy.deepcopy(script.get("base_config") or asked.get("base_config") or {})
    if script:
        config = renamed(config)
        for path in (*OF_CANDIDATES, *asked["space"]):
            drop_path(config, path)
    return config


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values after a round trip through JSON."""
    found: dict[str, Any] = json.loads(json.dumps(values))
    return found


def _stated(objective: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an objective that change its meaning; other versions may write more."""
    return {name: objective[name] for name in ("metric", "weight", "min", "max") if objective.get(name) is not None}


def _said(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return "; ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _lengths_words(lengths: Mapping[str, float]) -> str:
    """The three commonest classes."""
    top = sorted(lengths.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{share:.0%} up to {edge}" for edge, share in top)


def _space_words(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    added, removed = [name for name in after if name not in before], [name for name in before if name not in after]
    other = [name for name in after if name in before and before[name] != after[name]]
    parts = [("new", added), ("gone", removed), ("other values", other)]
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in parts if names)


def _settings_words(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    return "; ".join(f"{key} {_said(before.get(key))}, now {_said(after.get(key))}" for key in differing(before, after))


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted paths."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {prefix + key: value}
    return found
