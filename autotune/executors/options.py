"""The `--executor-option`s: their names, and values that are numbers, seconds, or one of two words."""

import math
from collections.abc import Mapping

from autotune.errors import UserError, nearest


def check_names(executor: str, options: Mapping[str, str], known: Mapping[str, str]) -> None:
    """Checks that an executor knows all options."""
    for name in options:
        if name not in known:
            every = ", ".join(known) or "none"
            raise UserError(f"--executor-option {name}: unknown to {executor}.{nearest(name, known)} Known: {every}")


def number(options: Mapping[str, str], name: str, usual: float, least: float = 0.0) -> float:
    """Returns an option that is a finite number of at least `least`."""
    try:
        found = float(options.get(name) or usual)
    except ValueError:
        found = math.nan
    if not least <= found < math.inf:
        raise UserError(f"--executor-option {name}={options[name]}: a number of at least {least:g} is needed")
    return found


def is_usual(options: Mapping[str, str], name: str, usual: str = "yes", other: str = "no") -> bool:
    """Returns whether an option that takes two words is the usual one, as by default."""
    value = options.get(name, usual)
    if value not in (usual, other):
        raise UserError(f"--executor-option {name}={value}: {usual} or {other} is needed")
    return value == usual


def whole(options: Mapping[str, str], name: str) -> int:
    """Returns an option that is a whole number, 1 by default."""
    value = options.get(name, "1")
    if not value.isdecimal():
        raise UserError(f"--executor-option {name}={value}: a whole number is needed")
    return int(value)
