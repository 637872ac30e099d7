"""Prints what pip takes for the oldest releases that pyproject.toml allows: of each floor's series the newest patch."""

import re
import tomllib
from pathlib import Path


def floors(text: str) -> dict[str, str]:
    """The lower bound of each dependency by name, as `2.6` or `5`."""
    found = {}
    for requirement in tomllib.loads(text)["project"]["dependencies"]:
        name, bound = re.fullmatch(r"([A-Za-z0-9_.-]+)>=([0-9.]+)(?:,<[0-9.]+)?", requirement).groups()
        found[name] = bound
    return found


def series(bound: str) -> str:
    """The releases that differ from a floor by fixes alone: `2.6` and `2.6.0` are `2.6.*`, `5` is `5.0.*`."""
    return ".".join([*bound.split("."), "0"][:2]) + ".*"


if __name__ == "__main__":
    bounds = floors((Path(__file__).parent.parent / "pyproject.toml").read_text())
    print(*(f"{name}=={series(bound)}" for name, bound in bounds.items()), sep="\n")
