"""Names of the studies of re-tunings in a database."""

import re


def generation_name(name: str, generation: int) -> str:
    """Name in the database of the study of a study's n-th re-tuning."""
    return f"{name}.retune-{generation}"


def generation_of(name: str) -> tuple[str, int]:
    """The study that a name in the database belongs to, and the number of its re-tuning (0: none)."""
    found = re.fullmatch(r"(.+)\.retune-([0-9]+)", name)
    return (found[1], int(found[2])) if found else (name, 0)
