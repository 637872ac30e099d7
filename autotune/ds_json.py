"""The DeepSpeed JSON that a person wrote: read, and held against what DeepSpeed reads, since it ignores much that it does not know."""

from __future__ import annotations

import json
from typing import Any

from autotune.candidate import (
    DEEPEST,
    SECTION_KEYS,
    TOP_LEVEL_KEYS,
    ConfigError,
    DsConfig,
    at_path,
    check_plain,
    nearest,
)

# Settings that the tuner itself calculates with or compares, and what DeepSpeed takes for them ("auto" is dropped before).
_SWITCH, _NUMBER, _TEXT = (bool,), (int, float), (str,)
KINDS: dict[tuple[type, ...], tuple[str, tuple[str, ...]]] = {
    _SWITCH: ("true or false", (
        "bf16.enabled", "fp16.enabled", "torch_autocast.enabled", "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states",
        "zero_optimization.overlap_comm", "zero_optimization.contiguous_gradients",
    )),
    _NUMBER: ("a number", (
        "zero_optimization.reduce_bucket_size", "zero_optimization.allgather_bucket_size", "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold", "zero_optimization.stage3_max_live_parameters",
        "zero_optimization.stage3_max_reuse_distance", "zero_optimization.zero_hpz_partition_size", "gradient_clipping",
    )),
    _TEXT: ("a text", (
        "optimizer.type", "scheduler.type", "torch_autocast.dtype", "data_types.grad_accum_dtype", "data_types.buffer_dtype",
        "communication_data_type", "zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device",
        "zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.nvme_path",
    )),
}  # fmt: skip
_KIND_OF: dict[str, tuple[str, tuple[type, ...]]] = {
    path: (words, kinds) for kinds, (words, paths) in KINDS.items() for path in paths
}
SECTIONS = (
    *SECTION_KEYS, "optimizer", "scheduler", "optimizer.params", "scheduler.params", "pipeline", "autotuning",
    "zero_optimization.offload_optimizer", "zero_optimization.offload_param",
)  # fmt: skip


def read_config(text: str, where: str) -> DsConfig:
    """Reads a DeepSpeed JSON and checks its keys.

    Args:
        text: The JSON.
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
        raise ConfigError(f"{where}: it is nested more than {DEEPEST} deep, as no DeepSpeed configuration is") from None
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    check_config(config, where)
    return dict(config)


def check_config(config: Any, where: str) -> None:
    """Refuses a DeepSpeed configuration with a key that DeepSpeed does not read (it would be ignored silently).

    Raises:
        ConfigError: It names the key and the nearest one known.
    """
    if not isinstance(config, dict):
        raise ConfigError(f"{where}: a DeepSpeed configuration is a JSON object, not {type(config).__name__}")
    check_plain(config, where)
    for section, value in config.items():
        if section not in TOP_LEVEL_KEYS:
            raise ConfigError(f"{where}: DeepSpeed has no key {section!r}.{nearest(section, TOP_LEVEL_KEYS)}")
        if section in SECTIONS and not isinstance(value, dict):
            raise ConfigError(f"{where}: {section!r} is a section (a JSON object), not {value!r}")
        if section in SECTION_KEYS:
            for key in value:
                if key not in SECTION_KEYS[section]:
                    raise ConfigError(
                        f"{where}: DeepSpeed's {section!r} has no key {key!r}.{nearest(key, SECTION_KEYS[section])}"
                    )
    for path in SECTIONS:
        if not isinstance(value := at_path(config, path), dict | None) and value != "auto":
            raise ConfigError(f"{where}: {path!r} is a section (a JSON object), not {value!r}")
    for path in _KIND_OF:
        if (value := at_path(config, path)) != "auto":
            check_setting(path, value, f"{where}: {path}")


def check_setting(path: str, value: Any, where: str) -> None:
    """Refuses a value of another kind than DeepSpeed takes for a setting that the tuner itself calculates with; None is its default.

    Raises:
        ConfigError: It says what kind is needed.
    """
    words, kinds = _KIND_OF.get(path, ("", (object,)))
    if value is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and kinds is _NUMBER)):
        raise ConfigError(f"{where}: {words} is needed, not {value!r}")


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
