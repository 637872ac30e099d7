"""What the user asks for: a target, a search space, objectives and a budget, from YAML, presets and flags."""

from __future__ import annotations

import itertools
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    ValidationError,
    field_validator,
    model_validator,
)

from autotune import masking, urls
from autotune.candidate import LARGEST_BATCH, DsConfig, nearest, without_auto
from autotune.documents import read_yaml, written
from autotune.ds_json import check_config, read_config
from autotune.invocation import DS_CONFIG, MAPPED_KEYS, Invocation, check_templates, templates_in
from autotune.objective import Constraint, Objective, bounds, parse_bytes, parse_seconds
from autotune.space import SearchSpace, parse_parameters
from autotune.target import YAML, SpecError, Target, inspect_target, is_script, is_yaml, read_text

M = TypeVar("M", bound=BaseModel)
Kind = Literal["search_spaces", "objectives"]
DEFAULT_SPACES = ("batch", "zero", "precision", "checkpointing")
DEFAULT_OBJECTIVES = ("latency", "throughput", "convergence", "memory")
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu")
# Where a flag is not just the key with dashes.
FLAGS = {
    "memory_filter": "--filter",
    "name": "--study",
    "script_set": "--set",
    "executor_options": "--executor-option",
    "objectives": "--objective",
    "time_budget_s": "--time-budget",
    "device_memory_bytes": "--device-memory",
}
NO_SECRET = (
    f"{masking.HIDDEN} stands for a secret, which autotune never writes down; let the script read it from a variable of the environment"
    " (in a launch command: $NAME), or give the whole command again"
)
# Keys that are written only where they say something.
OPTIONAL = (
    "script_args",
    "script_set",
    "arg_mappings",
    "working_dir",
    "nodes",
    "executor_options",
    "hostfile",
    "from_checkpoint",
)
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
# What a study's folder is called; a file system takes 255 bytes, and re-tunings put their number behind it.
LONGEST_NAME = 200
# A name that a re-tuning's study has in the database, or that the database itself has beside the studies' folders.
RESERVED = re.compile(r".+\.retune-[0-9]+|.+\.db(-wal|-shm|-journal)?", re.IGNORECASE)
# More samples, trials or bytes than this are a slip of the finger, and no longer exact as JSON's numbers.
MOST, MOST_RANKS, LARGEST_BYTES = 2**53, 2**16, 2**60
LARGEST_SEED = 2**32 - 1  # numpy takes no larger one
LONGEST_S = 1e9


def _read_global_batch(given: Any) -> Any:
    value = given
    if isinstance(value, str) and (found := re.fullmatch(r"\s*(\d{1,18})\s*\.\.\s*(\d{1,18})\s*", value)):
        value = (int(found[1]), int(found[2]))
    elif isinstance(value, str) and re.fullmatch(r"\s*\d{1,18}\s*", value):
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        value = (value, value)
    whole = isinstance(value, list | tuple) and len(value) == 2 and all(type(end) is int for end in value)
    if value not in ("keep", "free") and not (whole and 1 <= value[0] <= value[1] <= LARGEST_BATCH):
        raise ValueError(f"{given!r} is not keep, free, or a range of samples such as 8..64")
    return tuple(value) if whole else value


def _read_share(given: Any) -> Any:
    text = given.strip() if isinstance(given, str) else ""
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1) if text else given
    except ValueError:
        raise ValueError(f"{given!r} is not a share such as 0.01 or 1%") from None


def read_share(text: str, where: str) -> float:
    """A share such as 0.03 or 3%, below 1.

    Raises:
        SpecError: It is none.
    """
    try:
        share = float(_read_share(text))
    except ValueError:
        raise SpecError(f"{where}: {text!r} is not a share such as 0.01 or 1%") from None
    if not 0 <= share < 1:
        raise SpecError(f"{where}: {text} is not between 0 and 100%")
    return share


Count = Annotated[int, Field(strict=True, ge=1, le=MOST)]
Ranks = Annotated[int, Field(strict=True, ge=1, le=MOST_RANKS)]
Natural = Annotated[int, Field(strict=True, ge=0, le=MOST)]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0, le=LARGEST_BYTES)]
Share = Annotated[float, BeforeValidator(_read_share), Field(ge=0, lt=1, allow_inf_nan=False)]
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(gt=0, le=LONGEST_S, allow_inf_nan=False)]


class StudySpec(BaseModel):
    """Everything that defines a study; `to_yaml` writes it whole, presets resolved, and `load` reads it back.

    Attributes:
        name: The study's folder below `studies/`.
        target: The user's `model.py` or training script, absolute; what `command` starts, where there is one.
        command: A launch command, whose script is tuned; the file keeps it instead of the target.
        script_args: The script's command line; `{micro_batch_size}` and other fields of a candidate in it are filled in.
        script_set: Module constants of the script to replace, and by what, with the same templates.
        arg_mappings: Flags of the script that carry a setting, by DeepSpeed's name of it, as in DeepSpeed's own tuner.
        working_dir: Folder that a script or a command runs in; None for the script's own.
        invocation: What a run of `command` showed; never written.
        space: What is tuned.
        objectives: What is optimised.
        constraints: Bounds that a solution must keep.
        trials: Trials in all, the baseline included.
        time_budget_s: Wall time after which no trial is started; None for no limit.
        ranks: Ranks of every trial; None for one on each device of the machines (on a CPU: one on each machine).
        nodes: Machines that the ranks of a trial are spread over; None for one, or for all that `hostfile` names.
        executor: The engine that runs trials: `local`, `slurm` or `ray`.
        executor_options: What it is told, by the names that it knows.
        hostfile: Machines that `local` reaches over the user's own ssh, as DeepSpeed's launcher takes them: `HOST slots=N` a line.
        base_config: The user's own DeepSpeed configuration, which is the baseline and what candidates are laid over.
        global_batch: `keep` the baseline's samples per optimizer step, leave them `free`, or bound them (lowest,
            highest). By default kept if `base_config` sets a batch, else free.
        device_memory_bytes: Stated memory limit of a device; None for what it has.
        sampler: What proposes the next candidate; see `autotune ls samplers`.
        memory_filter: Candidates that surely do not fit the device memory are not run.
        stop_below: The study ends when no candidate is expected to improve any objective by this share; 0 for never. Only
            `physics` knows.
        stop_trials: A trial ends as soon as it is seen to be worse than a measured one on every objective.
        storage: Optuna storage URL; None for SQLite in `studies/autotune.db`. Written to the file without its password.
        parallel: Trials at once, where devices or nodes are disjoint.
        overlap: Trials may run at once on one host, too, where they disturb one another.
        learning_rate_rule: How the learning rate follows the global batch: `linear`, `sqrt`, `adascale`, `surge`, `none`, or
            `auto`: linear for SGD, sqrt for others.
        seed: Seed of weights, data order and search.
        trial_budget_s: Training time of one trial, warm-up included.
        trial_deadline_s: Wall time after which a trial's processes are killed.
        min_samples: Samples that a trial trains on at least, as far as its budget goes.
        finalists: Candidates that are checked and measured again at the end, together with the baseline; 0: nothing is.
        repeats: How often each of them is.
        branch: Candidates with another global batch are checked by a branch before they may be recommended.
        branch_tokens: Tokens (samples, where those are no sequences) that each side of a branch trains on; None for twice what
            the baseline trains on in a trial.
        from_checkpoint: Weights that the noise probe and branches start from; None for those that a probe has warmed up.
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
    objectives: tuple[Objective, ...]
    constraints: tuple[Constraint, ...] = ()
    trials: Count = 30
    time_budget_s: Seconds | None = None
    ranks: Ranks | None = None
    nodes: Ranks | None = None
    executor: Literal["local", "slurm", "ray"] = "local"
    executor_options: dict[str, str] = Field(default_factory=dict)
    hostfile: Path | None = None
    base_config: DsConfig | None = None
    global_batch: Annotated[Literal["keep", "free"] | tuple[int, int], BeforeValidator(_read_global_batch)] = "free"
    device_memory_bytes: Bytes | None = None
    sampler: str = "physics"
    memory_filter: bool = True
    stop_below: Share = 0.01
    stop_trials: bool = True
    storage: str | None = None
    parallel: Ranks = 1
    overlap: bool = False
    learning_rate_rule: Literal["auto", "none", "linear", "sqrt", "adascale", "surge"] = "auto"
    seed: Annotated[int, Field(strict=True, ge=0, le=LARGEST_SEED)] = 0
    trial_budget_s: Seconds = 10.0
    trial_deadline_s: Seconds = 300.0
    min_samples: Natural = 0
    finalists: Natural = 3
    repeats: Count = 2
    branch: bool = True
    branch_tokens: Count | None = None
    from_checkpoint: Path | None = None

    @classmethod
    def load(
        cls, path: Path, overrides: Mapping[str, Any] | None = None, invocation: Invocation | None = None
    ) -> StudySpec:
        """Reads a `study.yaml`; paths in it are relative to its folder.

        Args:
            path: The file.
            overrides: Values from flags by field name, which go before the file's; None means that the flag is absent.
            invocation: What a run of its `command` showed, if it has one.

        Raises:
            SpecError: It names the file (or flag), the key, and what is known.
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
    def of_command(
        cls, invocation: Invocation, overrides: Mapping[str, Any] | None = None, path: Path | None = None
    ) -> StudySpec:
        """The study of a launch command.

        Args:
            invocation: What a run of the command showed.
            overrides: As for `load`.
            path: The study.yaml that holds the command; None for the default study.
        """
        if path is not None:
            spec = cls.load(path, overrides, invocation)
        else:
            script = Path(invocation.script)
            data = {"target": str(script), "command": invocation.command, "working_dir": "."}
            spec = cls._build(data, f"`{invocation.command}`", Path.cwd(), overrides, _default_name(script), invocation)
        target = spec.inspected()
        if target.kind != "script":
            raise SpecError(
                f"`{invocation.command}` starts {target.path}, which is no training script: autotune run {target.path.name}"
            )
        spec._check_script(target)
        return spec

    @classmethod
    def of_target(cls, path: Path, overrides: Mapping[str, Any] | None = None) -> StudySpec:
        """The default study of a `model.py` or a script; arguments and errors as for `load`."""
        data = {"target": str(path.absolute())} | ({"working_dir": "."} if is_script(path) else {})
        return cls._build(data, str(path), Path.cwd(), overrides, _default_name(path))

    @classmethod
    def of(cls, path: Path, overrides: Mapping[str, Any] | None = None) -> StudySpec:
        """The study that a command's TARGET means, a `study.yaml` or a `model.py`; its target is checked too."""
        kind = cls.load if is_yaml(path) else cls.of_target
        if not is_yaml(path):
            inspect_target(path)
        spec = kind(path, overrides)
        target = inspect_target(spec.target)
        if target.kind == "script":
            spec._check_script(target)
        elif spec.script_args or spec.script_set:
            raise SpecError(
                f"{spec.target}: a model.py takes no arguments; leave out {' '.join((*spec.script_args, *spec.script_set))}"
            )
        return spec

    def inspected(self) -> Target:
        """What the target is, from its syntax tree, or from who starts it."""
        return inspect_target(
            self.target, launched=self.invocation is not None and self.invocation.world_size is not None
        )

    def how(self) -> Invocation:
        """How the script is started: as the launch command showed, or as it was named."""
        if self.invocation is not None:
            return self.invocation
        return Invocation(
            script=str(self.target), arguments=self.script_args, working_dir=str(self.working_dir or self.target.parent)
        )

    def templated(self) -> tuple[str, ...]:
        """The templates that the user wrote, by the field that they mean."""
        how = self.how()
        return templates_in([*how.arguments, *how.environment.values(), *self.script_set.values()])

    def _check_script(self, target: Target) -> None:
        for where, texts in (("-- ARGS", self.how().arguments), (flag("script_set"), self.script_set.values())):
            if any(map(masking.holds_mask, texts)):
                raise SpecError(f"{where}: {NO_SECRET}")
        if not Path(self.how().working_dir).is_dir():
            raise SpecError(
                f"working_dir: there is no folder {self.how().working_dir}, which {target.path.name} is to run in"
            )
        check_templates([*self.how().arguments, *self.script_set.values(), self.command or ""], str(target.path))
        if self.base_config is not None and DS_CONFIG not in self.templated():
            raise SpecError(
                f"{flag('base_config')}: a script brings its own DeepSpeed configuration, which is the baseline; only where {{ds_config}}"
                " stands for its path on the command line is it given here"
            )
        for name in self.script_set:
            if name not in target.constants:
                raise SpecError(
                    f"--set {name}: {target.path.name} assigns no such constant at its top level.{nearest(name, target.constants)}"
                )

    @property
    def n_nodes(self) -> int:
        """Machines that the ranks of a trial are spread over."""
        return self.nodes or (len(read_hostfile(self.hostfile)) if self.hostfile else 1)

    @property
    def runs_elsewhere(self) -> bool:
        """Whether trials run on other machines than this one."""
        return self.executor != "local" or self.hostfile is not None

    @property
    def stated_ranks(self) -> int | None:
        """Ranks of a trial, as `ranks` says, else as many on each host as the hostfile gives slots to each; None if neither does."""
        slots = list(read_hostfile(self.hostfile).values())[: self.n_nodes] if self.hostfile else [None]
        fewest = min((n for n in slots if n is not None), default=0) if None not in slots else 0
        return self.ranks or fewest * self.n_nodes or None

    def nodes_for(self, world_size: int) -> int:
        """Machines for so many ranks: one, where they cannot be spread evenly over all."""
        return self.n_nodes if world_size % self.n_nodes == 0 else 1

    @property
    def batch_is_configured(self) -> bool:
        """Whether the user's DeepSpeed configuration sets a batch size."""
        return _sets_batch(self.base_config)

    def to_yaml(self, folder: Path | None = None) -> str:
        """The whole study as a commented YAML file.

        Args:
            folder: Where the file will lie: the target is written relative to it. Absolute if not given.
        """
        target = os.path.relpath(self.target, folder) if folder is not None else str(self.target)
        left_out = [
            "invocation",
            *(name for name in OPTIONAL if not getattr(self, name)),
            *(["executor"] if self.executor == "local" else []),
        ]
        if self.command is not None:  # which says the rest
            left_out += ["target", "script_args"]
        else:
            left_out += ["command"]
        batch = self.global_batch if isinstance(self.global_batch, str) else "{}..{}".format(*self.global_batch)
        data: dict[str, Any] = {name: getattr(self, name) for name in type(self).model_fields}
        data |= {
            name: masking.masked(data[name])
            for name in ("command", "script_args", "script_set", "executor_options", "base_config")
        }
        if self.invocation is not None and self.ranks == self.invocation.world_size:
            data["ranks"] = None
        if self.working_dir is not None:
            data["working_dir"] = (
                os.path.relpath(self.working_dir, folder) if folder is not None else str(self.working_dir)
            )
        if self.hostfile is not None:
            data["hostfile"] = os.path.relpath(self.hostfile, folder) if folder is not None else str(self.hostfile)
        if self.from_checkpoint is not None:
            data["from_checkpoint"] = (
                os.path.relpath(self.from_checkpoint, folder) if folder is not None else str(self.from_checkpoint)
            )
        data |= {
            "storage": self.storage and urls.masked(self.storage),
            "target": target,
            "space": self.space.to_data(),
            "objectives": [objective.model_dump(exclude_defaults=True) for objective in self.objectives],
            "constraints": [constraint.model_dump(exclude_defaults=True) for constraint in self.constraints],
            "global_batch": batch,
        }
        return "".join(_commented(key, value) for key, value in data.items() if key not in left_out)

    @classmethod
    def _build(
        cls, data: Mapping[Any, Any], where: str, folder: Path, overrides: Mapping[str, Any] | None, name: str,
        invocation: Invocation | None = None,
    ) -> StudySpec:  # fmt: skip
        given = {key: _Given(value, f"{where}: {key}", folder) for key, value in data.items()}
        for key, value in (overrides or {}).items():
            if value is not None:
                given[key] = _Given(value, flag(key), Path.cwd())
        known = [name for name in cls.model_fields if name != "invocation"]
        for key in given:
            if key not in known:
                raise SpecError(f"{where}: unknown key {key!r}.{nearest(str(key), known)} Known: {', '.join(known)}")
        if invocation is None and given.get("command", _Given(None, where, folder)).value is not None:
            raise SpecError(f"{where}: command: it has to be run first")  # a caller's mistake
        given.setdefault("name", _Given(name, f"{where}: name", folder))
        given.setdefault("space", _Given(list(DEFAULT_SPACES), where, folder))
        given.setdefault("objectives", _Given(list(DEFAULT_OBJECTIVES), where, folder))
        values: dict[str, Any] = {
            key: READERS[key](*value) if key in READERS else value.value for key, value in given.items()
        }
        values = {
            key: value
            for key, value in values.items()
            if value is not None or key not in ("constraints", "global_batch")
        }
        values.setdefault(
            "global_batch",
            "keep"
            if _sets_batch(values.get("base_config")) or invocation or is_script(values.get("target"))
            else "free",
        )
        if invocation is not None:
            values["invocation"], values["ranks"] = invocation, values.get("ranks") or invocation.world_size
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            key = str(first["loc"][0]) if first["loc"] else ""
            raise SpecError(_message(error, given[key].where if key in given else where)) from None

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        check_name(name)
        if RESERVED.fullmatch(name):
            raise ValueError(
                f"{name!r} cannot name a study: databases and re-tunings have such names; choose one with another ending"
            )
        return name

    @model_validator(mode="after")
    def _check_whole(self) -> StudySpec:
        if not self.space.parameters:
            raise ValueError("space: it is empty, so there is nothing to tune")
        if not self.objectives:
            raise ValueError("objectives: at least one is needed")
        for kind in ("name", "metric"):
            seen = [getattr(objective, kind) for objective in self.objectives]
            twice = next((value for value in seen if seen.count(value) > 1), None)
            if twice:
                raise ValueError(f"objectives: {kind} {twice!r} is there twice")
        if self.hostfile is not None and self.executor != "local":
            raise ValueError(f"hostfile: it is for --executor local; {self.executor} chooses the machines itself")
        if self.nodes and self.ranks and self.ranks % self.nodes:
            raise ValueError(
                f"ranks: {self.ranks} ranks cannot be spread evenly over {self.nodes} nodes; give a multiple"
            )
        if self.trial_budget_s >= self.trial_deadline_s:
            raise ValueError(
                f"trial_deadline_s: {self.trial_deadline_s:g} s would end every trial before its trial_budget_s of"
                f" {self.trial_budget_s:g} s is over; give a longer deadline, or a smaller budget"
            )
        ends: dict[str, dict[str, float]] = {}
        for metric, end, amount in bounds(self.objectives, self.constraints).values():
            ends.setdefault(metric, {})[end] = amount
        for metric, both in ends.items():
            if both.get("min", -math.inf) > both.get("max", math.inf):
                raise ValueError(
                    f"constraints: {metric}: min {both['min']:g} is above max {both['max']:g}, so nothing can hold both; change one of them"
                )
        return self


@dataclass(frozen=True)
class _Given:
    value: Any
    where: str
    folder: Path

    def __iter__(self) -> Iterator[Any]:
        return iter((self.value, self.where, self.folder))


def flag(key: str) -> str:
    """The command-line flag of a `StudySpec` key."""
    return FLAGS.get(key, f"--{key.replace('_', '-')}")


def check_name(name: str) -> None:
    """Refuses a study name that is not a plain folder name.

    Raises:
        ValueError: It says what a name may hold.
    """
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot name a study: letters, digits, '.', '_' and '-', not starting with a dot or a dash"
        )
    if len(name) > LONGEST_NAME:
        raise ValueError(f"{name[:40]!r}... is too long to name a study: at most {LONGEST_NAME} characters")


def _default_name(path: Path) -> str:
    """The file's name, or its folder's where the file is called what such files are always called."""
    path = path.absolute()
    name = path.parent.name if path.stem in ("study", "model") and path.parent.name else path.stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip(".-")[:LONGEST_NAME] or "study"


def _message(error: ValidationError, where: str) -> str:
    first = error.errors()[0]
    inner = "".join(f": {part}" for part in first["loc"][1:] if isinstance(part, str))
    if first["type"] == "value_error":
        return f"{where}{inner}: {first['msg'].removeprefix('Value error, ')}"
    if first["type"] == "missing":
        return f"{where}{inner or ': ' + '.'.join(map(str, first['loc']))} is missing"
    text = first["msg"].removeprefix("Input ")
    return f"{where}{inner}: {text}, not {first['input']!r}"


def stated_command(target: str, overrides: Mapping[str, Any] | None = None) -> tuple[str, Path] | None:
    """The launch command that a TARGET is, or that a study.yaml holds, and its folder; None where TARGET is another file.

    What exists is a file; anything else that starts with a program is a command line.

    Raises:
        SpecError: It is neither, and nearly one of them.
    """
    path = Path(target)
    if os.path.exists(target):
        if (
            not is_yaml(path)
            or path.is_dir()
            or not isinstance(data := read_yaml(path), dict)
            or data.get("command") is None
        ):
            return None
        if not isinstance(data["command"], str):
            raise SpecError(f"{path}: command: a command line is needed, not {data['command']!r}")
        if "target" in data or data.get("script_args"):
            raise SpecError(f"{path}: command: it says which script is run and how; leave out target and script_args")
        if masking.holds_mask(data["command"]):
            raise SpecError(f"{path}: command: {NO_SECRET}")
        folder = (
            _read_folder(data.get("working_dir"), f"{path}: working_dir", path.absolute().parent)
            or path.absolute().parent
        )
        if not folder.is_dir():
            raise SpecError(f"{path}: working_dir: there is no folder {folder}; the command has to run somewhere")
        return data["command"], folder
    words = [word for word in target.split() if not re.match(r"\w+=", word)]
    if not words:
        return None
    first = Path(words[0])
    if first.suffix in (".py", *YAML) and len(words) > 1 and os.path.exists(first) and not os.access(first, os.X_OK):
        raise SpecError(f"{target}: to run a script with arguments: autotune run {words[0]} -- {' '.join(words[1:])}")
    if len(words) == 1 and (not (overrides or {}).get("script_args") or first.suffix in (".py", *YAML)):
        return (target, Path.cwd()) if target != words[0] or (shutil.which(target) and not first.suffix) else None
    return target, Path.cwd()


def stated_storage(path: Path) -> str | None:
    """The database that a study.yaml names; None where it names none, or cannot be read."""
    try:
        data = read_yaml(path) if path.is_file() else None
    except SpecError:
        return None
    found = data.get("storage") if isinstance(data, dict) else None
    return found if isinstance(found, str) else None


def _sets_batch(config: Mapping[str, Any] | None) -> bool:
    return any(key in without_auto(dict(config or {})) for key in BATCH_KEYS)


def _items(value: Any) -> list[Any]:
    """A list of presets: as it is, from a comma-separated text, or from one item."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, list | tuple) else [value]


def _read_space(value: Any, where: str, folder: Path) -> SearchSpace:
    if isinstance(value, SearchSpace):
        return value
    parts = []
    items = _items(value)
    for index, item in enumerate(items):
        if isinstance(item, str) and item in items[:index]:
            raise SpecError(f"{where}: {item!r} is there twice")
        place, data = load_preset("search_spaces", item, folder, where) if isinstance(item, str) else (where, item)
        parts.append((place, parse_parameters(data, place)))
    return SearchSpace.compose(parts)


def _read_objectives(value: Any, where: str, folder: Path) -> tuple[Objective, ...]:
    found = []
    for item in _items(value):
        place, data = load_preset("objectives", item, folder, where) if isinstance(item, str) else (where, item)
        if isinstance(data, Objective):
            found.append(data)
            continue
        if not isinstance(data, dict):
            raise SpecError(f"{place}: an objective is a mapping with a metric, as in `metric: step_time_s`")
        if isinstance(item, str):
            data = {"name": Path(item).stem} | data
        elif "name" not in data and "metric" in data:
            data = {"name": data["metric"]} | data
        found.append(_validated(Objective, data, place))
    return tuple(found)


def _read_constraints(value: Any, where: str, folder: Path) -> tuple[Constraint, ...] | None:
    if value is None:
        return None
    if isinstance(value, dict):
        for metric, said in value.items():
            if not isinstance(said, dict):
                raise SpecError(
                    f"{where}: {metric}: a mapping with `min` or `max` is needed, as in `{{max: 4GiB}}`, not {said!r}"
                )
        value = [{"metric": metric, **said} for metric, said in value.items()]
    if not isinstance(value, list | tuple):
        raise SpecError(
            f"{where}: a mapping of metrics to bounds is needed, as in `peak_memory_bytes: {{max: 4GiB}}`, not {value!r}"
        )
    return tuple(item if isinstance(item, Constraint) else _validated(Constraint, item, where) for item in value)


def _validated(model: type[M], data: Any, where: str) -> M:
    for key in data if isinstance(data, dict) else ():
        if key not in model.model_fields:
            raise SpecError(
                f"{where}: unknown key {key!r}.{nearest(str(key), model.model_fields)} Known: {', '.join(model.model_fields)}"
            )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        key = next((str(part) for part in error.errors()[0]["loc"][:1]), "")
        raise SpecError(
            _message(error, f"{where}: {key}" if key and error.errors()[0]["type"] != "missing" else where)
        ) from None


def _read_base(value: Any, where: str, folder: Path) -> DsConfig | None:
    if value is None:
        return None
    if isinstance(value, str | Path):
        path = _inside(value, folder, where)
        return masking.without_secrets(read_config(read_text(path, where), str(path)))
    check_config(value, where)
    return masking.without_secrets(value)


def _read_target(value: Any, where: str, folder: Path) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise SpecError(f"{where}: the path of a model.py is needed, not {value!r}")
    return _inside(value, folder, where)


def _read_arguments(value: Any, where: str, folder: Path) -> tuple[str, ...]:
    words = value if value is not None else ()
    if not isinstance(words, list | tuple) or not all(isinstance(word, str | int | float) for word in words):
        raise SpecError(f"{where}: a list of words is needed, as in [--lr, '0.1'], not {value!r}")
    return tuple(map(str, words))


def _pairs(value: Any, where: str, example: str) -> Iterable[tuple[Any, Any]]:
    """What NAME=VALUE texts say, or a mapping."""
    if value is None:
        return ()
    if isinstance(value, dict):
        return value.items()
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise SpecError(f"{where}: a mapping of names to values is needed, as in {example}, not {value!r}")
    return [(name, text) for name, _, text in (item.partition("=") for item in value)]


def _read_script_set(value: Any, where: str, folder: Path) -> dict[str, str]:
    pairs = list(_pairs(value, where, "BATCH: '{micro_batch_size}'"))
    for name, text in pairs:
        if not (isinstance(name, str) and name.isidentifier() and str(text)):
            raise SpecError(f"{where}: {name!r} is not NAME=VALUE, as in BATCH={{micro_batch_size}}")
    return {str(name): str(text) for name, text in pairs}


def _read_options(value: Any, where: str, folder: Path) -> dict[str, str]:
    pairs = list(_pairs(value, where, "partition: gpu"))
    for name, text in pairs:
        if not (isinstance(name, str) and re.fullmatch(r"[a-z_]+", name) and str(text)):
            raise SpecError(f"{where}: {name!r} is not NAME=VALUE, as in partition=gpu")
        if isinstance(text, dict | list) or text is None or not str(text).isprintable():
            raise SpecError(f"{where}: {name}: a single value is needed, as in partition=gpu, not {text!r}")
    yes_no = {True: "yes", False: "no"}  # which YAML reads as truth values
    return {str(name): yes_no[text] if isinstance(text, bool) else str(text) for name, text in pairs}


def _read_mappings(value: Any, where: str, folder: Path) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise SpecError(
            f"{where}: a mapping of settings to flags is needed, as in `train_micro_batch_size_per_gpu: --bsz`, not {value!r}"
        )
    for key, name in value.items():
        if key not in MAPPED_KEYS:
            raise SpecError(
                f"{where}: unknown setting {key!r}.{nearest(str(key), MAPPED_KEYS)} Known: {', '.join(MAPPED_KEYS)}"
            )
        if not isinstance(name, str) or not name.startswith("-"):
            raise SpecError(f"{where}: {key}: a flag of the script is needed, as in --bsz, not {name!r}")
    return dict(value)


def _read_folder(value: Any, where: str, folder: Path) -> Path | None:
    return None if value is None else _inside(value, folder, where)


def _read_checkpoint(value: Any, where: str, folder: Path) -> Path | None:
    if value is None:
        return None
    path = _inside(value, folder, where)
    if not os.path.exists(path):
        raise SpecError(
            f"{where}: there is no {path}; give the folder of a DeepSpeed checkpoint, or a state dict's file"
        )
    return path


# The keys that take more than pydantic to read: from (value, its place in words, the folder that paths start from).
READERS: dict[str, Callable[[Any, str, Path], Any]] = {
    "space": _read_space,
    "objectives": _read_objectives,
    "constraints": _read_constraints,
    "base_config": _read_base,
    "target": _read_target,
    "script_args": _read_arguments,
    "script_set": _read_script_set,
    "arg_mappings": _read_mappings,
    "working_dir": _read_folder,
    "hostfile": _read_folder,
    "executor_options": _read_options,
    "from_checkpoint": _read_checkpoint,
}


def _inside(path: Any, folder: Path, where: str) -> Path:
    """A path that the user gave, from a folder on.

    Raises:
        SpecError: It is none.
    """
    if not isinstance(path, str | Path):
        raise SpecError(f"{where}: a path is needed, not {path!r}")
    if re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", str(path)):
        raise SpecError(f"{where}: {str(path)!r} holds control characters, or is not UTF-8; rename the file")
    try:
        return Path(os.path.abspath(folder / Path(path).expanduser()))
    except RuntimeError:  # ~nobody/
        raise SpecError(f"{where}: {path}: there is no such user's home folder; write the whole path") from None


# A machine's name or address, and a user's before it.
HOST = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_\[:][\w.:\]%-]*")


def read_hostfile(path: Path) -> dict[str, int | None]:
    """The machines of a hostfile and their slots, as DeepSpeed's launcher reads it: `HOST slots=N` a line, `#` begins a comment.

    Raises:
        SpecError: It cannot be read, and which line is at fault.
    """
    hosts: dict[str, int | None] = {}
    for number, line in enumerate(read_text(path, "--hostfile").splitlines(), 1):
        text = line.partition("#")[0].strip()
        found = re.fullmatch(r"(\S+)(?:\s+slots\s*=\s*([1-9]\d{0,4}))?", text)
        if text and (found is None or not HOST.fullmatch(found[1])):  # ssh would take -oProxyCommand=... for an option
            raise SpecError(f"{path}:{number}: `HOST slots=N` is needed, not {text!r}")
        if found and found[1] in hosts:
            raise SpecError(f"{path}:{number}: {found[1]} is there twice")
        if found:
            hosts[found[1]] = int(found[2]) if found[2] else None
    if not hosts:
        raise SpecError(f"{path}: it names no host")
    return hosts


def preset_folder(kind: Kind) -> Path:
    """Where the presets of a kind lie: in the installed package, else in the checkout."""
    packaged = Path(__file__).parent / "_presets" / kind
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / kind


def presets(kind: Kind) -> dict[str, Path]:
    """The presets of a kind by name."""
    return {path.stem: path for path in sorted(preset_folder(kind).glob("*.yaml"))}


def preset_summary(path: Path) -> str:
    """The comment that a preset opens with, up to its first full stop or colon, for a list of presets."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return re.split(r"[.:](?=\s|$)", " ".join(line.lstrip("# ") for line in lines))[0]


def find_preset(kind: Kind, name_or_path: str, relative_to: Path, where: str) -> Path:
    """The file of a preset: a name is one of ours; what ends in .yaml or .yml, or has a separator, is a path.

    Args:
        kind: Which presets.
        name_or_path: As the user gave it.
        relative_to: Folder that a relative path starts from.
        where: What to call its place in an error.

    Raises:
        SpecError: There is no such preset.
    """
    if is_yaml(Path(name_or_path)) or "/" in name_or_path or os.sep in name_or_path:
        return _inside(name_or_path, relative_to, where)
    known = presets(kind)
    if name_or_path not in known:
        listed = {"search_spaces": "spaces", "objectives": "objectives"}[kind]
        raise SpecError(
            f"{where}: unknown {name_or_path!r}.{nearest(name_or_path, known)} Known: {', '.join(known)},"
            f" or the path of a .yaml file. See `autotune ls {listed}`."
        )
    return known[name_or_path]


def load_preset(kind: Kind, name_or_path: str, relative_to: Path, where: str) -> tuple[str, Any]:
    """Reads a preset; arguments and errors as for `find_preset`.

    Returns:
        What to call it in an error, and its data.
    """
    path = find_preset(kind, name_or_path, relative_to, where)
    place = f"{kind}/{name_or_path}.yaml" if name_or_path in presets(kind) else str(path)
    return place, read_yaml(path, where)


COMMENTS = {
    "command": "The launch command; it is run once to see which script it starts, and how.",
    "script_args": "The script's command line, and constants in it that are replaced.",
    "arg_mappings": "Flags of the script that carry a setting.",
    "working_dir": "Where the script runs.",
    "target": "The model or the training script, relative to this file.",
    "space": "What is tuned: each knob with its values; null leaves DeepSpeed's default.",
    "objectives": "What is optimised.",
    "constraints": "Bounds that a solution must keep.",
    "trials": "The budget: trials in all, and wall time (null: no limit).",
    "ranks": "Ranks of every trial; null is one for each device.",
    "nodes": "Machines that they are spread over.",
    "executor": "The engine that runs trials, and what it is told.",
    "hostfile": "Machines that trials reach over ssh.",
    "base_config": "The baseline's DeepSpeed configuration, which candidates are laid over.",
    "global_batch": "Samples per optimizer step: keep the baseline's, free, or LOWEST..HIGHEST.",
    "device_memory_bytes": "Memory limit of a device; null is what it has.",
    "storage": "null is SQLite in studies/autotune.db.",
    "parallel": "Trials at once; on one host only if they may overlap, where they disturb one another.",
    "trial_budget_s": "Training time of one trial, and when its processes are killed.",
    "finalists": "The best are checked and measured again at the end, this many, this often.",
    "branch": "Other global batches are checked by a branch from the baseline's state, on so many tokens.",
}


def _commented(key: str, value: Any) -> str:
    comment = f"\n# {COMMENTS[key]}\n" if key in COMMENTS else ""
    if key in ("space", "objectives", "constraints") and value:
        rows = value.items() if isinstance(value, dict) else [(None, item) for item in value]
        lines = "".join(f"  {name}: {_flow(item)}\n" if name else f"  - {_flow(item)}\n" for name, item in rows)
        return f"{comment}{key}:\n{lines}"
    if isinstance(value, dict):
        return f"{comment}{written({key: value}, flow=False)}"
    return f"{comment}{key}: {_flow(value)}\n"


def _flow(value: Any) -> str:
    """One line of YAML."""
    return written(list(value) if isinstance(value, tuple) else value, flow=True)
