"""transformers' Trainer and Accelerate: both read the batch and the precision beside DeepSpeed's configuration."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from autotune.worker.patching import after_import, patch

if TYPE_CHECKING:
    from autotune.worker.hooks import Hooks


def install(hooks: Hooks) -> None:
    """Sets the hooks on transformers and accelerate, wherever they are imported."""

    def on_trainer(module: ModuleType) -> None:
        def init(original: Any, *args: Any, **kwargs: Any) -> None:
            hooks.family = "transformers' Trainer"
            original(*args, **kwargs)

        patch(module.Trainer, "__init__", init)

    def on_accelerator(module: ModuleType) -> None:
        def init(original: Any, *args: Any, **kwargs: Any) -> None:
            hooks.family = hooks.family or "Accelerate"  # the Trainer makes an Accelerator too
            original(*args, **kwargs)

        patch(module.Accelerator, "__init__", init)

    after_import("transformers.trainer", on_trainer)
    after_import("accelerate.accelerator", on_accelerator)
