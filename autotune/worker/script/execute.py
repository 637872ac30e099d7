"""Run the user's script in a rank as `python FILE` or `python -m NAME` would: folder, arguments, environment."""

import ast
import importlib.util
import os
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.trial.target import module_constants
from autotune.trial.workload import Script


def in_rank(script: Script, ds_config: Path) -> Script:
    """Returns the script with its templates filled in for this rank; also sets its environment variables."""
    values = {"{ds_config}": str(ds_config.absolute()), "{local_rank}": os.environ["LOCAL_RANK"]}

    def filled(text: str) -> str:
        for template, value in values.items():
            text = text.replace(template, value)
        return text

    os.environ.update({name: filled(value) for name, value in script.environment.items()})
    return replace(
        script,
        arguments=tuple(map(filled, script.arguments)),
        assignments={name: filled(value) for name, value in script.assignments.items()},
    )


def execute(path: Path, script: Script) -> None:
    """Executes the file as `__main__`, with the assignments of the trial in place of the script's constants."""
    os.chdir(script.working_dir)
    sys.argv = [str(path), *script.arguments]
    # As Python does, which follows links.
    sys.path.insert(0, script.working_dir if script.module else os.path.dirname(os.path.realpath(path)))
    tree = ast.parse(path.read_bytes(), filename=str(path))
    for name, node in module_constants(tree.body):
        if name in script.assignments and node.value is not None:
            value = repr(_literal(script.assignments[name]))
            node.value = ast.parse(value, mode="eval").body  # no `ast.Constant` holds a list or a dict
    main = types.ModuleType("__main__")
    main.__file__ = str(path)
    if script.module:
        _as_module(main, script.module)
    sys.modules.pop("__main__", None)  # so that it comes last: it is among what was imported since the server's index
    sys.modules["__main__"] = main
    exec(compile(tree, str(path), "exec", dont_inherit=True), main.__dict__)  # else it would inherit our __future__


def _as_module(main: types.ModuleType, name: str) -> None:
    """Makes relative imports work as in a module of that name; this imports its parent packages."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is not None:
        main.__spec__, main.__package__ = spec, spec.parent


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
