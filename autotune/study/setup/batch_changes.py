"""Tells where a training does later what trials hardly see, which take its first seconds: a batch or lengths that change."""

import ast
from collections.abc import Iterator
from pathlib import Path

from autotune.space.deepspeed import DsConfig, at_path
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


def _enabled(config: DsConfig, path: str) -> bool:
    """Whether a section is switched on, and so is each one that it lies in."""
    keys = path.split(".")
    return all(at_path(config, ".".join([*keys[:i], "enabled"])) is True for i in range(1, len(keys) + 1))


def batch_changes(target: Path) -> list[str]:
    """Returns the places where a script, or a module of the user's that it imports, changes its batch, as `train.py, line 12`.

    These are DataLoaders that a loop makes and then uses, with a batch size that follows what the loop goes through or
    counts, and calls of DeepSpeed that set an engine's batch. Other ways are not seen.
    """
    found = list[str]()
    for path in sources(target):
        if (tree := parsed(path)) is not None:
            loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)]
            lines = {node.lineno for loop in loops for node in _loaders(loop)}
            lines |= {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) in SETTERS}
            found += [f"{path.name}, line {line}" for line in sorted(lines)]
    return found


def _loaders(loop: ast.For | ast.While) -> Iterator[ast.Assign]:
    """Yields the statements of a loop that make a DataLoader of a changing batch, which the loop uses itself.

    One that a loop keeps elsewhere, as in a dict of loaders by their split, is none.
    """
    changing, read = _changing(loop), _names(loop, ast.Load)
    for node in ast.walk(loop):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call) if (
                _called(call) == "DataLoader" and name in read
            ):
                sizes = [each.value for each in call.keywords if each.arg == "batch_size"] or call.args[1:2]
                if any(_names(size, ast.Load) & changing for size in sizes):
                    yield node


def _changing(loop: ast.For | ast.While) -> set[str]:
    """Returns the names whose values may differ from one turn of a loop to the next, as far as its own text shows."""
    changing = set[str]()
    while True:
        found = set(changing)
        for node in ast.walk(loop):
            match node:
                case ast.For(target=target):
                    found |= _names(target, ast.Store)
                case ast.AugAssign(target=target):
                    found |= _names(target, ast.Store)
                case ast.Assign(targets=targets, value=value) if _names(value, ast.Load) & found:
                    found |= {name for target in targets for name in _names(target, ast.Store)}
                case ast.If(test=test) if _names(test, ast.Load) & found:
                    found |= {name for each in (*node.body, *node.orelse) for name in _names(each, ast.Store)}
        if found == changing:
            return changing
        changing = found


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """Returns the names that are read or bound in a part of a syntax tree."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, context)}


def _called(call: ast.Call) -> str:
    """Returns the last part of the name of what is called."""
    return ast.unparse(call.func).rsplit(".", 1)[-1]
