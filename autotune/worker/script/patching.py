"""Monkey-patching: replace functions now, or right after their module is first imported; and find the user's calls."""

import ast
import functools
import importlib.abc
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from autotune.worker import project

# Modules that only pass a call on: ours, torch, those of Python, and those in which Lightning notes the arguments of loaders.
TRANSPARENT_MODULES = (
    "torch.",
    "autotune.",
    "functools.",
    "contextlib.",
    "pathlib.",
    "shutil.",
    "lightning.fabric.utilities.data.",
    "lightning_fabric.utilities.data.",
)


def patch(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    """Replaces a function by one that calls `hook(original, ...)`; for good, since the process ends with the trial.

    Args:
        owner: The module or class that holds it.
        name: Its name there; nothing happens if there is none, as in another version of the library.
        hook: Called instead, with the original function first; once, however often it is put there.
    """
    original = getattr(owner, name, None)
    if original is None or getattr(original, "hook", None) == hook:
        return

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    patched.original, patched.hook = original, hook  # type: ignore[attr-defined]
    setattr(owner, name, patched)


def patch_everywhere(module: ModuleType, hooks: Mapping[str, Callable[..., Any]]) -> None:
    """Patches functions of a module where they are defined, and their copies in modules that have them under whatever names."""
    if not _indexed:
        index_copies()
    originals = {name: original for name in hooks if (original := getattr(module, name, None)) is not None}
    wanted = set(map(id, originals.values()))
    newer = list(_copies(imported_since(), lambda value: id(value) in wanted))  # in one pass, which takes a while
    for name, original in originals.items():
        patch(module, name, hooks[name])
        defined = sys.modules.get(getattr(original, "__module__", None) or ""), getattr(original, "__name__", name)
        for other, alias in (defined, *_holders.get(id(original), ()), *newer):
            if getattr(other, "__dict__", {}).get(alias) is original:
                setattr(other, alias, getattr(module, name))
        _holders[id(getattr(module, name))] = _holders.get(id(original), [])  # it may be patched once more


def index_copies() -> None:
    """Notes which modules have imported functions of others: a rank that looked at each would copy thousands of pages."""
    _holders.clear()
    _indexed.clear()
    _indexed.update((id(module), module) for module in list(sys.modules.values()))
    # By type(), as isinstance() asks some objects for their class, and these warn.
    for module, name in _copies(list(_indexed.values()), lambda value: type(value) in (FunctionType, MethodType)):
        value = vars(module)[name]
        if value.__module__ != getattr(module, "__name__", ""):
            _holders.setdefault(id(value), []).append((module, name))


def _copies(modules: Iterable[Any], wanted: Callable[[Any], bool]) -> Iterator[tuple[Any, str]]:
    """Yields modules with the names under which they have what is wanted."""
    for module in modules:
        yield from ((module, name) for name, value in list(getattr(module, "__dict__", {}).items()) if wanted(value))


def imported_since() -> list[ModuleType]:
    """Returns the modules that were imported since the index was made, or all where there is none."""
    try:
        return list(itertools.takewhile(lambda module: id(module) not in _indexed, reversed(sys.modules.values())))
    except RuntimeError:  # another thread imports
        return list(sys.modules.values())


# By the identity of a function the modules that have it from another one, with its name there; and all that were looked at.
_holders: dict[int, list[tuple[ModuleType, str]]] = {}
_indexed: dict[int, ModuleType] = {}


def after_import(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Calls `callback(module)` now if the module is imported, else right after it has been executed.

    That is before other modules can bind its functions by `from module import function`.

    Args:
        name: Full name of the module; it need not exist.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        callback(module)
        return
    _finder.callbacks.setdefault(name, []).append(callback)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find a module, and calls the callbacks after its execution."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callable[[ModuleType], None]]] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.callbacks:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target)) is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for callback in self.callbacks.pop(name, []):
                callback(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _Finder()


def place_of(frame: FrameType | None) -> str | None:
    """Returns `file:line` of a frame."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else None


def users_caller() -> str | None:
    """Returns `file:line` of the nearest caller outside torch and autotune; None if that is a library."""
    return place_of(users_frame())


def users_frame(*, through_libraries: bool = False) -> FrameType | None:
    """Returns the frame of the nearest caller outside torch and autotune; None if that is a library.

    Args:
        through_libraries: Look for the user's call of a library, unless it is a framework.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module, generated = f"{frame.f_globals.get('__name__', '')}.", frame.f_code.co_filename.startswith("<")
        if not (generated or module.startswith(TRANSPARENT_MODULES)):
            if project.holds(frame.f_code.co_filename):
                return frame
            if not through_libraries or module.partition(".")[0] in project.FRAMEWORKS:
                return None
        frame = frame.f_back
    return None


def syntax_of(frame: FrameType | None) -> ast.Module:
    """Returns the syntax tree of a frame's file; an empty one without a frame, and for a file that cannot be read."""
    try:
        return ast.parse(Path(frame.f_code.co_filename).read_bytes()) if frame is not None else ast.Module([], [])
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])
