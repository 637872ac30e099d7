"""DeepSpeed configurations as scripts pass them: a dict, a path or a flag, with "auto" where a framework fills in."""

import ast
import contextlib
import os
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from autotune.errors import UserError
from autotune.space.candidate import from_deepspeed
from autotune.space.deepspeed import ConfigError, DsConfig
from autotune.trial.target import parsed, sources
from autotune.worker.script.patching import syntax_of

ACCUMULATION = "gradient_accumulation_steps"
FLAG = "deepspeed_config"  # DeepSpeed's own, among parsed arguments
# A larger JSON file holds data, which take time and memory to read.
LARGEST_BYTES = 2**20
# What DeepSpeed computes with; it takes "auto" elsewhere for its default.
NUMBERS = ("train_batch_size", "train_micro_batch_size_per_gpu", ACCUMULATION, "gradient_clipping")


def keep_auto(config: DsConfig, own: DsConfig, fixed: Container[str], prefix: str = "") -> None:
    """Sets values of `config` to "auto" where `own` has "auto", except at fixed paths."""
    for key, value in own.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            keep_auto(config[key], value, fixed, f"{path}.")
        elif value == "auto" and key in config and path not in fixed:
            config[key] = "auto"


def refuse_auto(own: DsConfig) -> None:
    """Raises UserError for an "auto" that nobody has filled in; DeepSpeed's error names neither key nor value."""
    if left := [name for name in NUMBERS if own.get(name) == "auto"]:
        raise UserError(
            f'the configuration that the script gives DeepSpeed has "auto" for {", ".join(left)}, which only transformers and'
            " Accelerate fill in: state a number"
        )


def sets_flag_itself(target: Path) -> bool:
    """Returns whether a script, or a module of the user's that it imports, sets the flag whatever the command line has there."""
    return any(_assigns_flag(tree) for path in sources(target) if (tree := parsed(path)) is not None)


def _assigns_flag(node: ast.AST) -> bool:
    """Returns whether code sets `args.deepspeed_config` where it does not ask for it first."""
    if isinstance(node, ast.If | ast.IfExp) and _names_flag(node.test):
        return False
    if isinstance(node, ast.Assign) and any(getattr(to, "attr", "") == FLAG for to in node.targets):
        return not _names_flag(node.value)
    return any(map(_assigns_flag, ast.iter_child_nodes(node)))


def _names_flag(code: ast.expr) -> bool:
    return any(FLAG in (getattr(node, "attr", ""), getattr(node, "value", "")) for node in ast.walk(code))


@contextlib.contextmanager
def without_config_flag(namespace: Any) -> Iterator[None]:
    """Clears the configuration's flag within the context, since DeepSpeed refuses a configuration given twice."""
    kept = getattr(namespace, FLAG, None)
    if kept is not None:
        setattr(namespace, FLAG, None)
    yield
    if kept is not None:
        setattr(namespace, FLAG, kept)


def read(stated: Any) -> DsConfig:
    """Reads the configuration that a script passes to `deepspeed.initialize`."""
    if isinstance(stated, dict):
        return {key: _plain(value) for key, value in stated.items()}
    if isinstance(stated, str | os.PathLike) and os.path.exists(stated):
        import hjson  # as DeepSpeed itself reads the file, which may have comments

        try:
            config = hjson.loads(Path(stated).read_text(encoding="utf-8-sig"), object_pairs_hook=dict)
        except (ValueError, RecursionError) as error:
            said = next(iter(str(error).splitlines()), "it is nested too deeply")
            raise UserError(f"{stated} is no JSON that DeepSpeed reads: {said}") from None
        if isinstance(config, dict):
            return config
        raise UserError(f"{stated} holds no JSON object, so it is no configuration of DeepSpeed's")
    if stated is None:
        raise UserError(
            "the script gives deepspeed.initialize no configuration: does it need its arguments, as --deepspeed_config ds.json?"
        )
    if isinstance(stated, str | os.PathLike):
        raise UserError(
            f"the script gives deepspeed.initialize {str(stated)!r} as its configuration: there is no such file"
        )
    raise UserError(
        "the script gives deepspeed.initialize a configuration that is neither a dict nor the path of a JSON file"
    )


def filled_from(own: DsConfig, files: Iterable[str]) -> tuple[str, DsConfig] | None:
    """Returns the JSON file from which a script has filled its dict, and what it has set there itself, by dotted path.

    The dict has all that is in the file, and more than half of it unchanged. None without such a file.
    """
    mine = _leaves(own)
    for file in files:
        with contextlib.suppress(UserError, OSError):
            small = os.path.isfile(file) and os.path.getsize(file) <= LARGEST_BYTES
            read_in = _leaves(read(file)) if small else {}
            changed = {path: value for path, value in mine.items() if path not in read_in or read_in[path] != value}
            if read_in.keys() <= mine.keys() and 2 * len(read_in.keys() - changed.keys()) > len(read_in):
                return file, changed
    return None


def in_trials(own: DsConfig, world_size: int) -> DsConfig:
    """Returns a script's configuration as a trial of the same settings has it: without what is switched off."""
    try:
        return from_deepspeed(own, world_size).to_deepspeed(own)
    except ConfigError:  # a framework fills in the batch
        return own


def _leaves(config: DsConfig, prefix: str = "") -> DsConfig:
    found: DsConfig = {}
    for key, value in config.items():
        found |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found


def _plain(value: Any) -> Any:
    """Returns a value of a dict as JSON has it: sections of classes with attributes often cannot be copied, nor numpy's numbers written."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def put(stated: dict[str, Any], config: DsConfig) -> None:
    """Has a script's dict hold a configuration, as it may look there later; sections of a class of the user's stay of that class."""
    for key in [key for key in stated if key not in config]:
        del stated[key]
    for key, value in config.items():
        section = stated.get(key)
        if isinstance(section, dict) and type(section) is not dict and isinstance(value, dict):
            put(section, value)
        else:
            stated[key] = value


def accumulation_in_code(frame: FrameType | None) -> str:
    """Returns what a script's configuration has its accumulation from, as `cfg.accum`.

    Empty for a number that is written there, for several such places, and if none is found.

    Args:
        frame: The script's frame at the call of `deepspeed.initialize`; None if a framework calls.
    """
    values = _values_of(syntax_of(frame), ACCUMULATION)
    found = {ast.unparse(value) for value in values if not isinstance(value, ast.Constant)}
    return found.pop() if len(found) == 1 else ""


def _values_of(tree: ast.Module, key: str) -> Iterator[ast.expr]:
    """Yields what code has for a key: in a dict that is written out, in a call as `dict(key=...)`, and as `config[key] = ...`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            yield from (value for name, value in pairs if isinstance(name, ast.Constant) and name.value == key)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "dict":
            yield from (word.value for word in node.keywords if word.arg == key)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            name = node.targets[0].slice
            yield from [node.value] if isinstance(name, ast.Constant) and name.value == key else []
