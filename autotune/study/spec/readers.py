"""Readers of the fields of `study.yaml`: from what a person writes to typed values."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from autotune.errors import SpecError, nearest
from autotune.scoring.objective import Constraint, Objective
from autotune.space.deepspeed import LARGEST_BATCH, DsConfig, check_config, read_config
from autotune.space.parameter import parse_parameters
from autotune.space.space import SearchSpace
from autotune.study.spec.presets import load_preset
from autotune.system import redaction
from autotune.system.files import _inside, read_text
from autotune.trial.command import MAPPED_KEYS

M = TypeVar("M", bound=BaseModel)


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


def _message(error: ValidationError, where: str) -> str:
    first = error.errors()[0]
    inner = "".join(f": {part}" for part in first["loc"][1:] if isinstance(part, str))
    if first["type"] == "value_error":
        return f"{where}{inner}: {first['msg'].removeprefix('Value error, ')}"
    if first["type"] == "missing":
        return f"{where}{inner or ': ' + '.'.join(map(str, first['loc']))} is missing"
    text = first["msg"].removeprefix("Input ")
    return f"{where}{inner}: {text}, not {first['input']!r}"


def _items(value: Any, where: str) -> list[Any]:
    """Presets as a list: from a list, a comma-separated text, or one item."""
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")]
        if len(parts) > 1 and not all(parts):
            raise SpecError(f"{where}: {value!r} has a comma too many; a name is missing there")
        return [part for part in parts if part]
    return list(value) if isinstance(value, list | tuple) else [value]


def _read_space(value: Any, where: str, folder: Path) -> SearchSpace:
    if isinstance(value, SearchSpace):
        return value
    parts = []
    items = _items(value, where)
    for index, item in enumerate(items):
        if isinstance(item, str) and item in items[:index]:
            raise SpecError(f"{where}: {item!r} is there twice")
        place, data = load_preset("search_spaces", item, folder, where) if isinstance(item, str) else (where, item)
        parts.append((place, parse_parameters(data, place)))
    return SearchSpace.compose(parts)


def _read_objectives(value: Any, where: str, folder: Path) -> tuple[Objective, ...]:
    found = []
    for item in _items(value, where):
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
        return redaction.without_secrets(read_config(read_text(path, where), str(path)))
    check_config(value, where)
    return redaction.without_secrets(value)


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
