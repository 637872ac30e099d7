"""DeepSpeed configurations as scripts state them: a dict, a path, a flag, with "auto" for what a framework fills in."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from autotune import UserError
from autotune.candidate import DsConfig


def keep_auto(config: DsConfig, own: DsConfig, fixed: Container[str], prefix: str = "") -> None:
    """Sets to "auto" what is so in `own` and there in `config`, but for the paths that are fixed."""
    for key, value in own.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            keep_auto(config[key], value, fixed, f"{path}.")
        elif value == "auto" and key in config and path not in fixed:
            config[key] = "auto"


def config_flag(namespace: Any) -> Any:
    """The path of a configuration among parsed arguments, as DeepSpeed names it."""
    return getattr(namespace, "deepspeed_config", None) or getattr(namespace, "deepscale_config", None)


@contextlib.contextmanager
def without_config_flag(namespace: Any) -> Iterator[None]:
    """DeepSpeed refuses a configuration given twice."""
    names = [name for name in ("deepspeed_config", "deepscale_config") if getattr(namespace, name, None) is not None]
    kept = {name: getattr(namespace, name) for name in names}
    for name in names:
        setattr(namespace, name, None)
    yield
    for name, value in kept.items():
        setattr(namespace, name, value)


def read(stated: Any) -> DsConfig:
    """The configuration that a script gives to `deepspeed.initialize`.

    Raises:
        UserError: It is neither a dict nor the path of a file.
    """
    if isinstance(stated, dict):
        return stated
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
    raise UserError(
        "the script gives deepspeed.initialize a configuration that is neither a dict nor the path of a JSON file"
    )
