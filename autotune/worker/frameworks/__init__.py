"""Adapters of training frameworks: what has to be patched above `deepspeed.initialize` so that a trial gets through to it.

Each has one `install(hooks)`, which registers with `patching.after_import` and costs nothing where the framework is not
imported. An adapter sets `hooks.family`, moves what the framework reads besides DeepSpeed's configuration, and keeps it from
leaving traces; it never measures, which is done at the engine for all of them alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.worker.frameworks import accelerate, huggingface, lightning

if TYPE_CHECKING:
    from autotune.worker.hooks import Hooks

ADAPTERS = (accelerate, huggingface, lightning)


def install(hooks: Hooks) -> None:
    """Sets every adapter on its framework, wherever that is imported."""
    for adapter in ADAPTERS:
        adapter.install(hooks)
