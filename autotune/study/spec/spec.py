"""`StudySpec`, the user's request: target, search space, objectives and budget, read from YAML, presets and flags."""

import contextlib
import functools
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError, field_validator, model_validator

from autotune.errors import SpecError, nearest
from autotune.executors.ssh import read_hostfile
from autotune.scoring.objective import Constraint, Objective, bounds
from autotune.space.deepspeed import DsConfig, without_auto
from autotune.space.space import SearchSpace
from autotune.study.spec.presets import DEFAULT_GOAL, DEFAULT_SPACES
from autotune.study.spec.readers import (
    READERS,
    Bytes,
    Count,
    GlobalBatch,
    Natural,
    Ranks,
    Seconds,
    Seed,
    Share,
    check_keys,
    first_error,
    objectives_of,
)
from autotune.study.spec.settings import SETTINGS, flag
from autotune.study.spec.yaml_file import commented, naming_lines, read_yaml
from autotune.study.storage import urls
from autotune.system import redaction
from autotune.system.files import absolute
from autotune.trial.command import DS_CONFIG, Invocation, check_templates, templates_in
from autotune.trial.target import YAML, Target, inspect_target, is_yaml

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu")
NO_SECRET = (
    f"{redaction.HIDDEN} stands for a secret, which autotune never writes down; let the script read it from a"
    " variable of the environment (in a launch command: $NAME), or give the whole command again"
)
# What `quick` stands for where a study does not state it.
QUICK = {"trials": 8, "finalists": 1, "repeats": 0, "stop_below": 0.03, "trial_budget_s": 1.0}
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
# Characters of a study's name, which is a folder's; a file system takes 255 bytes, and re-tunings append their number.
LONGEST_NAME = 200
# Names of re-tunings in the database, and of the database's own files, which lie beside the studies' folders.
RESERVED = re.compile(r".+\.retune-[0-9]+|.+\.db(-wal|-shm|-journal)?", re.IGNORECASE)


class _Stated(NamedTuple):
    """A value as the user gave it, its place for error messages, and the folder of its relative paths."""

    value: Any
    where: str
    folder: Path


# Settings that only the script shows to be right.
OF_THE_SCRIPT = ("target", "command", "script_args", "script_set", "arg_mappings", "base_config")


class StudySpec(BaseModel):
    """Definition of a study; `to_yaml` writes it with presets resolved, and `load` reads it back.

    `SETTINGS` describes the fields. Paths are absolute. `invocation` is the outcome of a run of `command`; it is never
    written. `global_batch` is `keep` by default if `base_config` sets a batch, else `free`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    target: Path
    command: str | None = None
    script_args: tuple[str, ...] = ()
    script_set: dict[str, str] = Field(default_factory=dict)
    arg_mappings: dict[str, str] = Field(default_factory=dict)
    working_dir: Path | None = None
    invocation: InstanceOf[Invocation] | None = Field(default=None, exclude=True)
    space: InstanceOf[SearchSpace]
    goal: str | None = None
    objectives: tuple[Objective, ...]
    constraints: tuple[Constraint, ...] = ()
    quick: bool = False
    trials: Count = SETTINGS["trials"].default
    time_budget_s: Seconds | None = None
    ranks: Ranks | None = None
    nodes: Ranks | None = None
    executor: Literal["local", "slurm", "ray"] = SETTINGS["executor"].default
    executor_options: dict[str, str] = Field(default_factory=dict)
    patience_s: Seconds = SETTINGS["patience_s"].default
    hostfile: Path | None = None
    base_config: DsConfig | None = None
    checkpoint_every: Natural = SETTINGS["checkpoint_every"].default
    global_batch: GlobalBatch = "free"
    device_memory_bytes: Bytes | None = None
    max_length: Count | None = None
    with_eval: bool = False
    with_save: bool = False
    sampler: str = SETTINGS["sampler"].default
    memory_filter: bool = SETTINGS["memory_filter"].default
    stop_below: Share = SETTINGS["stop_below"].default
    stop_trials: bool = SETTINGS["stop_trials"].default
    storage: str | None = None
    parallel: Ranks = SETTINGS["parallel"].default
    overlap: bool = False
    learning_rate_rule: Literal["auto", "none", "linear", "sqrt"] = SETTINGS["learning_rate_rule"].default
    seed: Seed = SETTINGS["seed"].default
    trial_budget_s: Seconds = SETTINGS["trial_budget_s"].default
    trial_deadline_s: Seconds = SETTINGS["trial_deadline_s"].default
    min_samples: Natural = SETTINGS["min_samples"].default
    finalists: Natural = SETTINGS["finalists"].default
    repeats: Natural = SETTINGS["repeats"].default
    branch: bool = SETTINGS["branch"].default
    branch_tokens: Count | None = None
    from_checkpoint: Path | None = None

    @classmethod
    @naming_lines
    def load(
        cls, path: Path, overrides: Mapping[str, Any] | None = None, invocation: Invocation | None = None
    ) -> "StudySpec":
        """Reads a `study.yaml`; paths in it are relative to its folder.

        Args:
            overrides: Values from flags by field name, which replace the file's; None means that the flag is absent.
            invocation: How its `command` starts the script, if it has one.

        Raises:
            SpecError: A value cannot be used; the message names the file or flag, the key, and known values.
        """
        data = read_yaml(path)
        if not isinstance(data, dict):
            raise SpecError(f"{path}: a study is a mapping of keys to values; `autotune init` writes an example")
        if invocation is not None:
            data = {**data, "target": invocation.script}
        if "target" not in data and (overrides or {}).get("target") is None:
            raise SpecError(f"{path}: target is missing: the path of a model.py, relative to this file")
        return cls._build(data, str(path), path.absolute().parent, overrides, _default_name(path), invocation)

    @classmethod
    def check(cls, overrides: Mapping[str, Any]) -> None:
        """Refuses settings that no study can have, before a launch command is run for its script; errors as for `load`."""
        stated = {key: value for key, value in overrides.items() if key not in OF_THE_SCRIPT}
        cls._build({"target": "a script"}, "the command", Path.cwd(), stated, "study")

    @classmethod
    def of_command(
        cls, invocation: Invocation, overrides: Mapping[str, Any] | None = None, path: Path | None = None
    ) -> "StudySpec":
        """Returns the study of a launch command.

        Args:
            overrides: As for `load`.
            path: The study.yaml that holds the command; None for the default study.
        """
        if path is not None:
            spec = cls.load(path, overrides, invocation)
        else:
            script = Path(invocation.script)
            data = {"target": str(script), "command": invocation.command, "working_dir": "."}
            spec = cls._build(data, f"`{invocation.command}`", Path.cwd(), overrides, _default_name(script), invocation)
        if spec.inspected.kind != "script":
            said = f"{spec.target}, which is no training script: autotune run {spec.target.name}"
            raise SpecError(f"`{invocation.command}` starts {said}")
        _check_script(spec)
        return spec

    @classmethod
    def of_target(cls, path: Path, overrides: Mapping[str, Any] | None = None) -> "StudySpec":
        """Returns the default study of a `model.py` or a script; arguments and errors as for `load`."""
        target = inspect_target(path)
        data = {"target": str(path.absolute())} | ({"working_dir": "."} if target.kind == "script" else {})
        return cls._build(data, str(path), Path.cwd(), overrides, _default_name(path), target=target)

    @classmethod
    def of(cls, path: Path, overrides: Mapping[str, Any] | None = None) -> "StudySpec":
        """Returns the study of a `study.yaml`, a `model.py` or a script, its target checked; errors as for `load`."""
        spec = cls.load(path, overrides) if is_yaml(path) else cls.of_target(path, overrides)
        (_check_script if spec.inspected.kind == "script" else _check_model)(spec)
        return spec

    @functools.cached_property
    def inspected(self) -> Target:
        """The target, as read once from its syntax tree."""
        launched = self.invocation is not None and self.invocation.world_size is not None
        return inspect_target(self.target, launched=launched)

    def how(self) -> Invocation:
        """Returns how the script is started: by the launch command, or with the given arguments."""
        if self.invocation is not None:
            return self.invocation
        return Invocation(
            script=str(self.target), arguments=self.script_args, working_dir=str(self.working_dir or self.target.parent)
        )

    def templated(self) -> tuple[str, ...]:
        """Returns the fields of a candidate that the user's templates name."""
        how = self.how()
        return templates_in([*how.arguments, *how.environment.values(), *self.script_set.values()])

    @property
    def n_nodes(self) -> int:
        """Number of machines of a trial."""
        return self.nodes or (len(read_hostfile(self.hostfile)) if self.hostfile else 1)

    @property
    def runs_elsewhere(self) -> bool:
        """Whether trials run on other machines."""
        return self.executor != "local" or self.hostfile is not None or self.n_nodes > 1

    @property
    def at_once(self) -> int:
        """Trials that share this machine at a time."""
        return self.parallel if self.overlap and not self.runs_elsewhere else 1

    @property
    def stated_ranks(self) -> int | None:
        """Ranks of a trial: `ranks`, else the smallest number of slots of a host on every host; None without both."""
        slots = list(read_hostfile(self.hostfile).values())[: self.n_nodes] if self.hostfile else [None]
        fewest = min((n for n in slots if n is not None), default=0) if None not in slots else 0
        return self.ranks or fewest * self.n_nodes or None

    def nodes_for(self, world_size: int) -> int:
        """Returns the number of machines for some ranks: one, if the ranks cannot be spread evenly over all."""
        return self.n_nodes if world_size % self.n_nodes == 0 else 1

    @property
    def batch_is_configured(self) -> bool:
        """Whether the user's DeepSpeed configuration sets a batch size."""
        return _sets_batch(self.base_config)

    def to_yaml(self, folder: Path | None = None) -> str:
        """Returns the study as a commented YAML file; its paths are relative to `folder`, or absolute without one."""
        left_out = {"invocation", *(("target", "script_args") if self.command is not None else ("command",))}
        left_out |= {name for name, setting in SETTINGS.items() if setting.optional and not getattr(self, name)}
        left_out |= {"executor"} if self.executor == "local" else set()
        left_out |= {"patience_s"} if not self.runs_elsewhere else set()
        data: dict[str, Any] = {name: getattr(self, name) for name in type(self).model_fields if name not in left_out}
        for name, value in data.items():
            if isinstance(value, Path):
                data[name] = os.path.relpath(value, folder) if folder is not None else str(value)
            elif name in ("command", "script_args", "script_set", "executor_options", "base_config"):
                data[name] = redaction.redact(value)
            elif name in ("objectives", "constraints"):
                data[name] = [each.model_dump(exclude_defaults=True) for each in value]
        if self.invocation is not None and self.ranks == self.invocation.world_size:
            data["ranks"] = None
        if isinstance(self.global_batch, tuple):
            data["global_batch"] = "{}..{}".format(*self.global_batch)
        data |= {"storage": self.storage and urls.redact_url(self.storage), "space": self.space.to_data()}
        return "".join(commented(name, value, SETTINGS[name].comment) for name, value in data.items())

    @classmethod
    def _build(
        cls, data: Mapping[Any, Any], where: str, folder: Path, overrides: Mapping[str, Any] | None, name: str,
        invocation: Invocation | None = None, target: Target | None = None,
    ) -> "StudySpec":  # fmt: skip
        given = {key: _Stated(value, f"{where}: {key}", folder) for key, value in data.items()}
        for key, value in (overrides or {}).items():
            if value is not None:
                given[key] = _Stated(value, flag(key), Path.cwd())
        check_keys(given, (name for name in cls.model_fields if name != "invocation"), where)
        wanted = _goal_or_objectives(overrides or {}, data)
        for key in {"goal", "objectives"} - set(wanted):
            given.pop(key, None)
        defaults = {"name": name, "space": list(DEFAULT_SPACES)} | ({} if wanted else {"goal": DEFAULT_GOAL})
        given = {key: _Stated(value, f"{where}: {key}", folder) for key, value in defaults.items()} | given
        values = {key: READERS[key](*value) if key in READERS else value.value for key, value in given.items()}
        if (goal := values.get("goal")) is not None:
            own = values.setdefault("objectives", objectives_of(goal))
            if own != objectives_of(goal):
                other = f"{given['objectives'].where} says otherwise; leave one of the two out"
                raise SpecError(f"{given['goal'].where}: {goal} sets the objectives, and {other}")
        if values.get("quick"):
            values = QUICK | (values if data.get("quick") else _stated_beside_quick(values, overrides or {}))
        for key in ("constraints", "global_batch"):
            if values.get(key, "") is None:
                del values[key]
        if invocation is None and (target is None or "target" in (overrides or {})):
            with contextlib.suppress(SpecError):  # reported when the target is used
                target = inspect_target(values["target"])
        if target is not None and target.kind == "study":
            said = "is a study itself; name the model.py or the training script that it tunes"
            raise SpecError(f"{given['target'].where}: {values['target']} {said}")
        scripted = invocation is not None or (target is not None and target.kind == "script")
        values.setdefault("global_batch", "keep" if scripted or _sets_batch(values.get("base_config")) else "free")
        if invocation is not None:
            values["invocation"], values["ranks"] = invocation, values.get("ranks") or invocation.world_size
        try:
            spec = cls.model_validate(values)
        except ValidationError as error:
            raise SpecError(first_error(error, where, {key: each.where for key, each in given.items()})) from None
        if target is not None:
            spec.__dict__["inspected"] = replace(target, path=spec.target)  # not read again
        return spec

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        check_name(name)
        if RESERVED.fullmatch(name):
            kept = "databases and re-tunings have such names"
            raise ValueError(f"{name!r} cannot name a study: {kept}; choose one with another ending")
        return name

    @model_validator(mode="after")
    def _check_whole(self) -> "StudySpec":
        _check_together(self)
        return self


def _goal_or_objectives(*layers: Mapping[str, Any]) -> list[str]:
    """Returns which of `goal` and `objectives` the first layer states that states any: a flag replaces what a file says."""
    stated = ([key for key in ("goal", "objectives") if each.get(key) is not None] for each in layers)
    return next(filter(None, stated), [])


def _stated_beside_quick(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is stated beside the option, for a file that autotune wrote states all, also what is as by default."""
    flags = {key for key, value in overrides.items() if value is not None}
    kept = [key for key in values if key not in QUICK or key in flags or values[key] != SETTINGS[key].default]
    return {key: values[key] for key in kept}


def _check_script(spec: StudySpec) -> None:
    """Refuses templates, constants and settings that a training script cannot take."""
    target = spec.inspected
    for where, texts in (("-- ARGS", spec.how().arguments), (flag("script_set"), spec.script_set.values())):
        if any(map(redaction.holds_mask, texts)):
            raise SpecError(f"{where}: {NO_SECRET}")
    if not os.path.isdir(folder := spec.how().working_dir):  # pathlib's raises for a name that is too long
        raise SpecError(f"working_dir: there is no folder {folder}, which {target.path.name} is to run in")
    check_templates([*spec.how().arguments, *spec.script_set.values(), spec.command or ""], str(target.path))
    if spec.checkpoint_every:
        raise SpecError("checkpoint_every: a script recomputes what it says itself; leave this key out")
    if spec.base_config is not None and DS_CONFIG not in spec.templated():
        raise SpecError(
            f"{flag('base_config')}: a script brings its own DeepSpeed configuration, which is the baseline; it is"
            " given here only where {ds_config} stands for its path on the command line"
        )
    for name in spec.script_set:
        if name not in target.constants:
            near = nearest(name, target.constants)
            raise SpecError(f"--set {name}: {target.path.name} assigns no such constant at its top level.{near}")


def _check_model(spec: StudySpec) -> None:
    """Refuses what a `model.py` has no use for."""
    if given := " ".join((*spec.script_args, *(f"{flag('script_set')} {name}" for name in spec.script_set))):
        raise SpecError(f"{spec.target}: a model.py takes no arguments; leave out {given}")
    if key := next((key for key in ("working_dir", "arg_mappings") if getattr(spec, key)), ""):
        raise SpecError(f"{key}: it is for scripts; leave it out, as a model.py takes no flags and runs here")
    if not (spec.base_config or {}).get("managed_gradient_accumulation", True):
        loop = "it leaves to a loop of your own which micro-batches make a step, and a model.py has none"
        raise SpecError(f"{flag('base_config')}: managed_gradient_accumulation: {loop}; leave it out")


def _check_together(spec: StudySpec) -> None:
    """Refuses settings that contradict each other."""
    if not spec.space.parameters:
        raise ValueError("space: it is empty, so there is nothing to tune")
    if not spec.objectives:
        raise ValueError("objectives: at least one is needed")
    for kind in ("name", "metric"):
        seen = [getattr(objective, kind) for objective in spec.objectives]
        twice = next((value for value in seen if seen.count(value) > 1), None)
        if twice:
            raise ValueError(f"objectives: {kind} {twice!r} is there twice")
    if spec.hostfile is not None and spec.executor != "local":
        raise ValueError(f"hostfile: it is for --executor local; {spec.executor} chooses the machines itself")
    if spec.nodes and spec.ranks and spec.ranks % spec.nodes:
        raise ValueError(f"ranks: {spec.ranks} ranks cannot be spread evenly over {spec.nodes} nodes; give a multiple")
    if spec.trial_budget_s >= spec.trial_deadline_s:
        raise ValueError(
            f"trial_deadline_s: {spec.trial_deadline_s:g} s would end every trial before its trial_budget_s of"
            f" {spec.trial_budget_s:g} s is over; give a longer deadline, or a smaller budget"
        )
    ends: dict[str, dict[str, float]] = {}
    for metric, end, amount in bounds(spec.objectives, spec.constraints).values():
        ends.setdefault(metric, {})[end] = amount
    for metric, both in ends.items():
        if both.get("min", -math.inf) > both.get("max", math.inf):
            low, high = f"min {both['min']:g}", f"max {both['max']:g}"
            raise ValueError(
                f"constraints: {metric}: {low} is above {high}, so nothing can hold both; change one of them"
            )


def check_name(name: str) -> None:
    """Refuses a study name that is not a plain folder name."""
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot name a study: letters from a to z, digits, '.', '_' and '-', not starting with a dot or a dash"
        )
    if len(name) > LONGEST_NAME:
        raise ValueError(f"{name[:40]!r}... is too long to name a study: at most {LONGEST_NAME} characters")


def _default_name(path: Path) -> str:
    """Returns the file's name, or its folder's for `model.py`, `study.yaml` and a package's `__main__.py`."""
    path = path.absolute()
    name = path.parent.name if path.stem in ("study", "model", "__main__") and path.parent.name else path.stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip(".-")[:LONGEST_NAME] or "study"


def stated_command(target: str, overrides: Mapping[str, Any] | None = None) -> tuple[str, Path] | None:
    """Returns the launch command that TARGET is or that a study.yaml holds, and its folder; None for any other file.

    An existing path is a file; any other text that starts with a program is a command line.

    Raises:
        SpecError: TARGET looks like a mistaken file or command.
    """
    path = Path(target)
    if os.path.exists(target):
        data = read_yaml(path) if is_yaml(path) and not path.is_dir() else None
        if not isinstance(data, dict) or data.get("command") is None:
            return None
        if not isinstance(data["command"], str):
            raise SpecError(f"{path}: command: a command line is needed, not {data['command']!r}")
        if "target" in data or data.get("script_args"):
            raise SpecError(f"{path}: command: it says which script is run and how; leave out target and script_args")
        if redaction.holds_mask(data["command"]):
            raise SpecError(f"{path}: command: {NO_SECRET}")
        return data["command"], absolute(data.get("working_dir") or ".", path.absolute().parent, f"{path}: working_dir")
    words = [word for word in target.split() if not re.match(r"\w+=", word)]
    if not words:
        return None
    first = Path(words[0])
    if first.suffix in (".py", *YAML) and len(words) > 1 and os.path.exists(first) and not os.access(first, os.X_OK):
        raise SpecError(f"{target}: to run a script with arguments: autotune run {words[0]} -- {' '.join(words[1:])}")
    if len(words) == 1 and (not (overrides or {}).get("script_args") or first.suffix in (".py", *YAML)):
        return (target, Path.cwd()) if target != words[0] or (shutil.which(target) and not first.suffix) else None
    return target, Path.cwd()


def _sets_batch(config: Mapping[str, Any] | None) -> bool:
    return any(key in without_auto(dict(config or {})) for key in BATCH_KEYS)
