"""Experiment trackers of a script under trial: what it logs there stays in the trial's folder, or nowhere."""

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from autotune.worker.script.context import ScriptContext
from autotune.worker.script.patching import after_import, patch, patch_everywhere

# Only offline is known to both of Neptune's clients, and to ClearML.
OFF = {
    "WANDB_MODE": "disabled", "COMET_MODE": "disabled", "COMET_START_ONLINE": "0", "COMET_OFFLINE_DIRECTORY": "{scratch}",
    "SWANLAB_MODE": "disabled", "CLEARML_OFFLINE_MODE": "1", "MLFLOW_TRACKING_URI": "file://{scratch}",
    "NEPTUNE_MODE": "offline", "NEPTUNE_DATA_DIRECTORY": "{scratch}", "NEPTUNE_LOG_DIRECTORY": "{scratch}",
}  # fmt: skip


def install(context: ScriptContext) -> None:
    """Sets the variables that trackers read, and patches what a script states over them, as from its configuration."""
    scratch = str(context.scratch.absolute())
    os.environ |= {name: value.replace("{scratch}", scratch) for name, value in OFF.items()}
    after_import("mlflow", lambda module: on_mlflow(context, module))
    after_import("comet_ml", on_comet)
    after_import("torch.utils.tensorboard.writer", lambda module: on_tensorboard(f"{scratch}/tensorboard", module))
    after_import("wandb", lambda module: patch(module, "init", _stating(mode="disabled")))


def on_mlflow(context: ScriptContext, module: ModuleType) -> None:
    """Patches what would move MLflow's runs out of the trial's folder to a server that the script names."""
    names = ("set_tracking_uri", "set_registry_uri")
    patch_everywhere(module, {name: context.saver(f"mlflow.{name}") for name in names})
    if hasattr(module, "MlflowClient"):  # which takes addresses alone
        patch(module.MlflowClient, "__init__", lambda original, client, *_args, **_kwargs: original(client))


def on_comet(module: ModuleType) -> None:
    """Patches the start of an experiment of Comet's, by its function or in its classes."""
    patch(module, "start", _stating(online=False))
    for name in ("Experiment", "ExistingExperiment"):
        if hasattr(module, name):
            patch(getattr(module, name), "__init__", _stating(disabled=True))


def on_tensorboard(folder: str, module: ModuleType) -> None:
    """Patches where TensorBoard's files are written: in the trial's folder."""

    def made(original: Callable[..., Any], writer: Any, log_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        original(writer, folder, *args, **kwargs)

    patch(module.SummaryWriter, "__init__", made)


def _stating(**settings: Any) -> Callable[..., Any]:
    """Returns a hook that states settings in place of the script's."""
    return lambda original, *args, **kwargs: original(*args, **{**kwargs, **settings})
