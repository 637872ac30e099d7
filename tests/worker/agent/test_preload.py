"""Modules that the server imports for its ranks."""

import ast
import importlib
from pathlib import Path

import pytest

from autotune.worker import run
from autotune.worker.agent import preload


@pytest.mark.parametrize("name", [*preload.LAZY_MODULES, *preload.RANK_MODULES])
def test_each_module_can_be_imported(name):
    assert importlib.import_module(name)


def test_every_mode_of_a_rank_is_imported():
    """A module that the entry point imports only for a mode would be imported in every rank that runs it."""
    imported = {
        node.module
        for node in ast.walk(ast.parse(Path(run.__file__).read_text()))
        if isinstance(node, ast.ImportFrom) and node.col_offset and str(node.module).startswith("autotune.worker.")
    }
    # The builder of ops comes with the server itself.
    assert imported - {"autotune.worker.agent"} == set(preload.RANK_MODULES) - {"autotune.worker.run"}


def test_a_module_of_ours_that_cannot_be_imported_is_an_error(monkeypatch):
    monkeypatch.setattr(preload, "RANK_MODULES", ("autotune.worker.no_such_module",))
    monkeypatch.setattr(preload, "LAZY_MODULES", ("deepspeed.no_such_module",))
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        preload.import_rank_modules()
