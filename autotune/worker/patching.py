"""Functions replaced before the user's script binds them: at once, or as soon as their module has been executed."""

from __future__ import annotations

import functools
import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def patch(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    """Replaces a function by one that calls `hook(original, ...)`; never put back, since the process ends with the trial.

    Args:
        owner: The module or class that holds it.
        name: Its name there; what has no such name (another version of the library) is left alone.
        hook: What is called instead.
    """
    if not hasattr(owner, name):
        return
    original = getattr(owner, name)

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    patched.original = original  # type: ignore[attr-defined]
    setattr(owner, name, patched)


def patch_everywhere(module: ModuleType, name: str, hook: Callable[..., Any]) -> None:
    """Patches a module's function, also under that name in all modules that have imported it."""
    original = getattr(module, name, None)
    if original is None:
        return
    patch(module, name, hook)
    for other in list(sys.modules.values()):
        if getattr(other, "__dict__", {}).get(name) == original:
            setattr(other, name, getattr(module, name))


def after_import(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Calls `callback(module)` now if the module is there, else right after it has been executed.

    That is before anybody can write `from module import function`, so that all of them get the patched one.

    Args:
        name: Full name of the module; it need not exist.
        callback: What patches it.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        callback(module)
        return
    _finder.callbacks.setdefault(name, []).append(callback)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: has whoever finds a module of interest tell when it has been executed."""

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
