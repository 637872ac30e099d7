"""The package's layout: no import circles, and modules, classes and functions of a bounded size."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
from support.paths import ROOT as CHECKOUT

ROOT = CHECKOUT / "autotune"
# Of a class and a function without its docstring, which may state formulas.
MAX_MODULE_LINES, MAX_CLASS_LINES, MAX_FUNCTION_LINES = 450, 250, 60


def modules() -> dict[str, Path]:
    """Files of the package by module name."""
    names = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(("autotune", *path.relative_to(ROOT).with_suffix("").parts))
        names[name.removesuffix(".__init__")] = path
    return names


def import_graph() -> dict[str, set[str]]:
    """What each module of the package imports of it, in functions and for types too; the `__init__` of packages do not count."""
    graph = grimp.build_graph("autotune", cache_dir=None)
    plain = {name for name in graph.modules if not graph.find_children(name)}
    return {name: graph.find_modules_directly_imported_by(name) & plain for name in plain}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of an import circle; none without one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def lines_of(node: ast.stmt) -> int:
    """Number of lines of a statement."""
    return (node.end_lineno or 0) - node.lineno + 1


def test_a_circle_is_found() -> None:
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()})) == {"a", "b", "c"}
    assert circle({"a": {"b"}, "b": set()}) == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = import_graph()
    assert len(graph) > 100 and circle(graph) == []


def test_modules_classes_and_functions_stay_small() -> None:
    large = []
    for path in modules().values():
        text = path.read_text()
        if len(text.splitlines()) > MAX_MODULE_LINES:
            large.append(f"{path}: {len(text.splitlines())} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                limit = MAX_CLASS_LINES if isinstance(node, ast.ClassDef) else MAX_FUNCTION_LINES
                said = node.body[0] if ast.get_docstring(node) else None
                n_lines = lines_of(node) - (lines_of(said) if said else 0)
                if n_lines > limit:
                    large.append(f"{path}:{node.lineno} {node.name}: {n_lines} lines")
    assert not large
