"""The `--executor-option`s: their names, and values that are numbers, seconds, yes or no."""

from collections.abc import Mapping

from autotune.errors import UserError, nearest


def check_names(executor: str, options: Mapping[str, str], known: Mapping[str, str]) -> None:
    """Checks that an executor knows all options."""
    for name in options:
        if name not in known:
            every = ", ".join(known) or "none"
            raise UserError(f"--executor-option {name}: unknown to {executor}.{nearest(name, known)} Known: {every}")


def number(options: Mapping[str, str], name: str, usual: float, kind: str = "a number") -> float:
    """Returns an option that is a number; `kind` says of what in an error."""
    try:
        return float(options.get(name) or usual)
    except ValueError:
        raise UserError(f"--executor-option {name}={options[name]}: {kind} is needed") from None


def is_yes(options: Mapping[str, str], name: str) -> bool:
    """Returns an option that is yes, as it is by default, or no."""
    value = options.get(name, "yes")
    if value not in ("yes", "no"):
        raise UserError(f"--executor-option {name}={value}: yes or no is needed")
    return value == "yes"


def whole(options: Mapping[str, str], name: str) -> int:
    """Returns an option that is a whole number, 1 by default."""
    value = options.get(name, "1")
    if not value.isdecimal():
        raise UserError(f"--executor-option {name}={value}: a whole number is needed")
    return int(value)
