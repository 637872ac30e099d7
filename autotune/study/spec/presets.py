"""The search spaces, objectives and goals that ship with the package."""

import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from autotune.errors import SpecError, unknown
from autotune.study.spec.yaml_file import read_yaml
from autotune.system.files import absolute
from autotune.trial.target import is_yaml

Kind = Literal["search_spaces", "objectives"]
DEFAULT_SPACES = ("batch", "zero", "precision", "checkpointing")
DEFAULT_GOAL = "balanced"


class Goal(NamedTuple):
    """What a person wants of a study.

    Attributes:
        means: What is recommended for this goal, in words.
        weights: Its objectives: names of presets, each with its weight in the recommendation.
    """

    means: str
    weights: Mapping[str, float]


# The weights say how much a doubling is worth: for `memory` half the memory pays for a throughput of 0.71.
GOALS: dict[str, Goal] = {
    "balanced": Goal(
        "the best compromise of step time, throughput and convergence; of memory too, where it is scarce",
        {"latency": 1.0, "throughput": 1.0, "convergence": 1.0},
    ),
    "throughput": Goal("the most samples per second", {"throughput": 1.0}),
    "latency": Goal("the shortest optimizer step", {"latency": 1.0}),
    "time-to-loss": Goal("the soonest at any target loss", {"convergence": 1.0}),
    "memory": Goal("the least memory, unless that costs too much throughput", {"memory": 1.0, "throughput": 0.5}),
    "cost": Goal("the fewest device-seconds to a target loss, and a smaller device", {"convergence": 1.0, "memory": 0.25}),
}  # fmt: skip
# The objective that joins a balanced goal where memory is scarce, and its weight.
SCARCE = ("memory", 0.5)


def preset_folder(kind: Kind) -> Path:
    """Returns the folder of the presets of a kind: in the installed package, else in the checkout."""
    packaged = Path(__file__).parent / "_presets" / kind
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / kind


def presets(kind: Kind) -> dict[str, Path]:
    """Returns the presets of a kind by name."""
    return {path.stem: path for path in sorted(preset_folder(kind).glob("*.yaml"))}


def preset_summary(path: Path) -> str:
    """Returns the comment at the head of a preset, up to its first full stop or colon."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return re.split(r"[.:](?=\s|$)", " ".join(line.lstrip("# ") for line in lines))[0]


def find_preset(kind: Kind, name_or_path: str, relative_to: Path, where: str) -> Path:
    """Returns the file of a preset; a text that ends in .yaml or .yml, or has a separator, is a path.

    Args:
        where: The option or file that names it, for the error.
    """
    if is_yaml(Path(name_or_path)) or "/" in name_or_path or os.sep in name_or_path:
        return absolute(name_or_path, relative_to, where)
    known = presets(kind)
    if name_or_path not in known:
        if not known:
            folder = preset_folder(kind)
            raise SpecError(
                f"{where}: unknown {name_or_path!r}: no presets lie in {folder}; give the path of a .yaml file, or install"
                " autotune whole"
            )
        for file in (f"{name_or_path}.yaml", f"{kind}/{name_or_path}.yaml"):
            if os.path.isfile(relative_to / file):  # also of what can be no name, as one that is too long
                raise SpecError(f"{where}: {name_or_path!r} is no preset; name your file by its path, {file}")
        listed = "spaces" if kind == "search_spaces" else kind
        raise SpecError(
            f"{where}: {unknown(name_or_path, known)}, or the path of a .yaml file. See `autotune ls {listed}`."
        )
    return known[name_or_path]


def load_preset(kind: Kind, name_or_path: str, relative_to: Path, where: str) -> tuple[str, Any]:
    """Returns the name of a preset for errors, and its data; arguments and errors as for `find_preset`."""
    path = find_preset(kind, name_or_path, relative_to, where)
    place = f"{kind}/{name_or_path}.yaml" if name_or_path in presets(kind) else str(path)
    return place, read_yaml(path, where)
