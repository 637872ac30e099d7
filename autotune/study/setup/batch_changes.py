"""Tells where a training does later what trials hardly see, which take its first seconds: a batch or lengths that change."""

import ast
from pathlib import Path

from autotune.space.deepspeed import DsConfig, at_path
from autotune.space.rule import range_words
from autotune.trial.target import parsed, sources

# DeepSpeed's own calls that change the batch of an engine, and the sections with which it changes what a step takes in.
SETTERS = {"set_train_batch_size", "set_train_micro_batch_size"}
SCHEDULES = (
    "curriculum_learning",
    "progressive_layer_drop",
    "data_efficiency.data_sampling.curriculum_learning",
    "data_efficiency.data_sampling.dynamic_batching",
    "data_efficiency.data_routing.random_ltd",
)


def notes(script: Path | None, config: DsConfig) -> list[str]:
    """Returns what the user of a script, and of its DeepSpeed configuration, should know of trainings that change as they go on.

    Args:
        script: The training script; None for a model.py, whose batches autotune makes.
    """
    found = list[str]()
    if script is not None and (places := batch_changes(script)):
        found.append(
            f"the script may change its batch while it trains ({'; '.join(places)}): trials see its first seconds alone, so the"
            " answer is that for the batch which it begins with, and less sure where only some trials came to the next one"
        )
    if sections := [name for name in SCHEDULES if _enabled(config, name)]:
        found.append(
            f"{' and '.join(f'`{name}`' for name in sections)} of your DeepSpeed configuration changes what a step computes as the"
            " training goes on: trials see its first seconds alone, so the answer is that for how it begins"
        )
    return found


def outside(batch: int, bounds: tuple[int, int] | None) -> list[str]:
    """Returns what the user should know of a baseline whose global batch lies outside of the bounds; empty where it does not."""
    if bounds is None or bounds[0] <= batch <= bounds[1]:
        return []
    return [
        f"the baseline has a global batch of {batch} and is what all others are compared with; they keep to"
        f" {range_words(bounds)}. If none is shown to be better, it is recommended all the same"
    ]


def _enabled(config: DsConfig, path: str) -> bool:
    """Whether a section is switched on, and so is each one that it lies in."""
    keys = path.split(".")
    return all(at_path(config, ".".join([*keys[:i], "enabled"])) is True for i in range(1, len(keys) + 1))


def batch_changes(target: Path) -> list[str]:
    """Returns where a script, or a module of the user's that it imports, sets an engine's batch anew, as `train.py, line 12`."""
    trees = {path.name: tree for path in sources(target) if (tree := parsed(path)) is not None}
    return [
        f"{name}, line {node.lineno}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SETTERS
    ]
