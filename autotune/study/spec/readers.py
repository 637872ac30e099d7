"""Readers of the fields of `study.yaml`: from what a person writes to typed values."""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter, ValidationError

from autotune.errors import SpecError, unknown
from autotune.scoring.objective import Constraint, Objective
from autotune.search import check_sampler
from autotune.space.deepspeed import LARGEST_BATCH, DsConfig, check_config, read_config
from autotune.space.parameter import parse_parameters
from autotune.space.space import SearchSpace
from autotune.study.spec.presets import GOALS, Kind, load_preset
from autotune.system import redaction
from autotune.system.files import absolute, read_text
from autotune.system.units import parse_memory, parse_seconds
from autotune.trial.command import MAPPED_KEYS

M = TypeVar("M", bound=BaseModel)


def _read_global_batch(given: Any) -> Any:
    value = given
    if isinstance(value, str) and (found := re.fullmatch(r"\s*(\d{1,18})\s*(?:\.\.\s*(\d{1,18})\s*)?", value)):
        value = (int(found[1]), int(found[2] or found[1]))
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


# Larger numbers are typing errors, and JSON's numbers are not exact above 2^53.
MOST = 2**53
Count = Annotated[int, Field(strict=True, ge=1, le=MOST)]
Natural = Annotated[int, Field(strict=True, ge=0, le=MOST)]
Ranks = Annotated[int, Field(strict=True, ge=1, le=2**16)]
Seed = Annotated[int, Field(strict=True, ge=0, le=2**32 - 1)]  # numpy takes no larger one
Bytes = Annotated[int, BeforeValidator(parse_memory), Field(gt=0, le=2**60)]
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(gt=0, le=1e9, allow_inf_nan=False)]
Share = Annotated[float, BeforeValidator(_read_share), Field(ge=0, lt=1, allow_inf_nan=False)]
GlobalBatch = Annotated[Literal["keep", "free"] | tuple[int, int], BeforeValidator(_read_global_batch)]


def read_share(text: str, where: str) -> float:
    """Returns the share of a text such as `0.03` or `3%`, which is below 1."""
    try:
        return TypeAdapter[float](Share).validate_python(text)
    except ValidationError as error:
        raise SpecError(first_error(error, where, {})) from None


def check_keys(data: Iterable[Any], known: Iterable[str], where: str, kind: str = "key ") -> None:
    """Refuses unknown keys."""
    known = list(known)
    for key in data:
        if key not in known:
            raise SpecError(f"{where}: {unknown(key, known, kind)}")


def first_error(error: ValidationError, where: str, places: Mapping[str, str]) -> str:
    """Returns pydantic's first error in one sentence.

    Args:
        where: The place of the data as a whole.
        places: The places of its fields, where they differ from `where: FIELD`.
    """
    first = error.errors()[0]
    key, *inner = [part for part in first["loc"] if isinstance(part, str)] or [""]
    place = ": ".join([places.get(key, f"{where}: {key}" if key else where), *inner])
    match first["type"]:
        case "value_error":
            said = first["msg"].removeprefix("Value error, ")
            named, _, rest = said.partition(": ")  # a check of several fields begins with the one to change
            return f"{places[named]}: {rest}" if not key and named in places else f"{place}: {said}"
        case "missing":
            return f"{place} is missing"
    return f"{place}: {first['msg'].removeprefix('Input ')}, not {first['input']!r}"


def _validated(model: type[M], data: Any, where: str) -> M:
    check_keys(data if isinstance(data, dict) else (), model.model_fields, where)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise SpecError(first_error(error, where, {})) from None


def _needed(where: str, needed: str, value: Any) -> SpecError:
    return SpecError(f"{where}: {needed}, not {value!r}")


def _presets(kind: Kind, value: Any, where: str, folder: Path) -> list[tuple[Any, str, Any]]:
    """Returns each item of a list, of a comma-separated text, or the one item, with its place and its data."""
    items = list(value) if isinstance(value, list | tuple) else [value]
    if isinstance(value, str):
        names = [part.strip() for part in value.split(",")]
        items = list(filter(None, names))
        if len(names) > max(1, len(items)):
            raise SpecError(f"{where}: {value!r} has a comma too many; a name is missing there")
    return [
        (item, *(load_preset(kind, item, folder, where) if isinstance(item, str) else (where, item))) for item in items
    ]


def _read_space(value: Any, where: str, folder: Path) -> SearchSpace:
    parts = _presets("search_spaces", value, where, folder)
    names = [item for item, _, _ in parts if isinstance(item, str)]
    for name in names:
        if names.count(name) > 1:
            raise SpecError(f"{where}: {name!r} is there twice")
    return SearchSpace.compose([(place, parse_parameters(data, place)) for _, place, data in parts])


def _read_objectives(value: Any, where: str, folder: Path) -> tuple[Objective, ...]:
    found = []
    for item, place, data in _presets("objectives", value, where, folder):
        if isinstance(data, dict):
            if "direction" in data:
                raise SpecError(
                    f"{place}: direction: the metric says which way is better (`autotune ls metrics`); leave it out"
                )
            name = Path(item).stem if isinstance(item, str) else data.get("metric")
            found.append(_validated(Objective, ({"name": name} if name is not None else {}) | data, place))
        else:
            raise SpecError(f"{place}: an objective is a mapping with a metric, as in `metric: step_time_s`")
    return tuple(found)


def _read_sampler(value: Any, where: str, folder: Path) -> Any:
    if isinstance(value, str):  # pydantic refuses the others
        check_sampler(value, where)
    return value


def _read_goal(value: Any, where: str, folder: Path) -> str | None:
    if value is not None and value not in list(GOALS):  # a list has no hash to be looked up by
        raise SpecError(f"{where}: {unknown(str(value), GOALS, 'goal ')}. See `autotune ls goals`.")
    return None if value is None else str(value)


def objective_of(name: str, weight: float) -> Objective:
    """Returns the objective of a preset with another weight."""
    (found,) = _read_objectives(name, name, Path())
    return found.model_copy(update={"weight": weight})


def objectives_of(goal: str) -> tuple[Objective, ...]:
    """Returns the objectives of a goal."""
    return tuple(objective_of(name, weight) for name, weight in GOALS[goal].weights.items())


def _read_constraints(value: Any, where: str, folder: Path) -> tuple[Constraint, ...] | None:
    if value is None:
        return None
    if isinstance(value, dict):
        for metric, said in value.items():
            if not isinstance(said, dict):
                needed = "a mapping with `min` or `max` is needed, as in `{max: 4GiB}`"
                raise _needed(f"{where}: {metric}", needed, said)
        value = [{"metric": metric, **said} for metric, said in value.items()]
    if not isinstance(value, list | tuple):
        needed = "a mapping of metrics to bounds is needed, as in `peak_memory_bytes: {max: 4GiB}`"
        raise _needed(where, needed, value)
    return tuple(_validated(Constraint, item, where) for item in value)


def _read_base(value: Any, where: str, folder: Path) -> DsConfig | None:
    if value is None:
        return None
    if isinstance(value, str | Path):
        path = absolute(value, folder, where)
        value = read_config(read_text(path, where), str(path))
    else:
        check_config(value, where)
    return redaction.without_secrets(value)


def _read_target(value: Any, where: str, folder: Path) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise _needed(where, "the path of a model.py is needed", value)
    return absolute(value, folder, where)


def _read_executor(value: Any, where: str, folder: Path) -> Any:
    if value == "kubernetes":
        raise SpecError(f"{where}: in Kubernetes the driver runs, too: `autotune submit TARGET --executor kubernetes`")
    return value  # pydantic refuses the others


def _read_arguments(value: Any, where: str, folder: Path) -> tuple[str, ...]:
    words = value if value is not None else ()
    if not isinstance(words, list | tuple) or not all(isinstance(word, str | int | float) for word in words):
        raise _needed(where, "a list of words is needed, as in [--lr, '0.1']", value)
    return tuple(map(str, words))


def _pairs(value: Any, where: str, name_pattern: str, example: str) -> dict[str, Any]:
    """Returns a mapping, or a list of NAME=VALUE texts, as a mapping; checks the names."""
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        names = [item.partition("=")[0] for item in value]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise SpecError(f"{where}: {twice} is there twice; give it once")
        value = {name: text for name, _, text in (item.partition("=") for item in value)}
    if not isinstance(value, dict | None):
        raise _needed(where, f"a mapping of names to values is needed, as in {example.replace('=', ': ')}", value)
    for name, given in (value or {}).items():
        if not (isinstance(name, str) and re.fullmatch(name_pattern, name) and str(given)):
            raise SpecError(f"{where}: {name!r} is not NAME=VALUE, as in {example}")
    return value or {}


def _read_script_set(value: Any, where: str, folder: Path) -> dict[str, str]:
    pairs = _pairs(value, where, r"[^\W\d]\w*", "BATCH={micro_batch_size}")
    return {name: str(text) for name, text in pairs.items()}


def _read_options(value: Any, where: str, folder: Path) -> dict[str, str]:
    pairs = _pairs(value, where, r"[a-z_]+", "partition=gpu")
    for name, given in pairs.items():
        if isinstance(given, dict | list | None) or not str(given).isprintable():
            raise _needed(f"{where}: {name}", "a single value is needed, as in partition=gpu", given)
    # YAML reads yes and no as truth values.
    return {
        name: str(given) if not isinstance(given, bool) else "yes" if given else "no" for name, given in pairs.items()
    }


def _read_mappings(value: Any, where: str, folder: Path) -> dict[str, str]:
    if not isinstance(value, dict | None):
        needed = "a mapping of settings to flags is needed, as in `train_micro_batch_size_per_gpu: --bsz`"
        raise _needed(where, needed, value)
    check_keys(value or {}, MAPPED_KEYS, where, "setting ")
    for key, name in (value or {}).items():
        if not isinstance(name, str) or not name.startswith("-"):
            raise _needed(f"{where}: {key}", "a flag of the script is needed, as in --bsz", name)
    return dict(value or {})


def _read_folder(value: Any, where: str, folder: Path) -> Path | None:
    return None if value is None else absolute(value, folder, where)


def _read_checkpoint(value: Any, where: str, folder: Path) -> Path | None:
    path = _read_folder(value, where, folder)
    if path is not None and not os.path.exists(path):
        raise SpecError(
            f"{where}: there is no {path}; give the folder of a DeepSpeed checkpoint, or a state dict's file"
        )
    return path


# Readers of the keys that pydantic alone cannot read: from the value, its place in words, and the folder of its paths.
READERS: dict[str, Callable[[Any, str, Path], Any]] = {
    "space": _read_space,
    "goal": _read_goal,
    "objectives": _read_objectives,
    "constraints": _read_constraints,
    "sampler": _read_sampler,
    "base_config": _read_base,
    "target": _read_target,
    "script_args": _read_arguments,
    "script_set": _read_script_set,
    "arg_mappings": _read_mappings,
    "working_dir": _read_folder,
    "hostfile": _read_folder,
    "executor": _read_executor,
    "executor_options": _read_options,
    "from_checkpoint": _read_checkpoint,
}
