"""What a trial of a training script writes: nothing of it may lie in the user's folders afterwards."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autotune import UserError
from autotune.worker.patching import after_import, patch

if TYPE_CHECKING:
    from autotune.worker.hooks import Hooks

SAVERS = ("save_checkpoint", "save_16bit_model", "save_fp16_model")
TRACKERS_OFF = {"WANDB_MODE": "disabled", "COMET_MODE": "disabled", "MLFLOW_TRACKING_URI": ""}
MOST_FILES_NAMED = 5


class Traces:
    """Keeps a script from saving, or has it write into the trial's own folder; what it writes all the same is listed.

    Args:
        hooks: What the trial knows.
        users_caller: Whether the user's own code is what calls.
    """

    def __init__(self, hooks: Hooks, users_caller: Callable[[], str | None]) -> None:
        self._hooks, self._users_caller = hooks, users_caller
        self._folder = str(hooks.recorder.folder.path.absolute()) + os.sep
        self._working_dir = str(Path(hooks.script.working_dir).absolute()) + os.sep
        self._files: list[str] = []
        self._folders: list[str] = []
        self._unsaved: set[str] = set()

    def install(self) -> None:
        """Patches what saves."""
        import deepspeed

        os.environ |= {
            name: value or f"file://{self._hooks.scratch.absolute()}" for name, value in TRACKERS_OFF.items()
        }
        for name in SAVERS:
            patch(deepspeed.DeepSpeedEngine, name, self._hooks.saver(f"engine.{name}"))
        patch(torch, "save", self._save)
        patch(torch, "load", self._load)
        for name in ("rename", "replace"):
            patch(os, name, self._rename)
        for name in ("remove", "unlink"):
            patch(os, name, self._remove)
        after_import(
            "torch.utils.tensorboard.writer",
            lambda module: patch(module.SummaryWriter, "__init__", self._summary_writer),
        )
        sys.addaudithook(self._audit)

    def close(self) -> None:
        """Removes the folders that the script made and left empty, and lists the files that it wrote elsewhere."""
        for folder in reversed(self._folders):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        for path in self._files[:MOST_FILES_NAMED]:
            self._hooks.once(f"the script itself writes {path}, in every trial")
        if len(self._files) > MOST_FILES_NAMED:
            self._hooks.once(
                f"the script itself writes {len(self._files) - MOST_FILES_NAMED} more files, in every trial"
            )

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Writes into the scratch folder, where `_load` finds it; but for weights, which cost time and space and nobody reads."""
        target = args[1] if len(args) > 1 else kwargs.get("f")
        if not isinstance(target, str | os.PathLike) or self._is_ours(os.fspath(target)):
            return original(*args, **kwargs)
        saved = args[0] if args else kwargs["obj"]
        if self._holds_weights(saved):
            self._hooks.once("torch.save of the model is not carried out in trials")
            self._unsaved.add(os.path.abspath(target))
            return None
        path = self._in_scratch(os.fspath(target))
        path.parent.mkdir(parents=True, exist_ok=True)
        return original(
            saved, path, *args[2:], **{name: value for name, value in kwargs.items() if name not in ("obj", "f")}
        )

    def _load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        source = args[0] if args else kwargs.get("f")
        if isinstance(source, str | os.PathLike) and self._in_scratch(os.fspath(source)).exists():
            args, kwargs = (
                (self._in_scratch(os.fspath(source)), *args[1:]),
                {k: v for k, v in kwargs.items() if k != "f"},
            )
        elif (
            isinstance(source, str | os.PathLike)
            and os.path.abspath(source) in self._unsaved
            and not os.path.exists(source)
        ):
            self._hooks.abort(UserError(f"the script reads {source} back, but trials do not save the model"))
        return original(*args, **kwargs)

    def _rename(self, original: Callable[..., Any], source: Any, target: Any, **kwargs: Any) -> Any:
        """As a file is moved into its place once it is whole."""
        if isinstance(source, str | os.PathLike) and isinstance(target, str | os.PathLike):
            if self._in_scratch(os.fspath(source)).exists():
                return original(self._in_scratch(os.fspath(source)), self._in_scratch(os.fspath(target)))
            if os.path.abspath(source) in self._unsaved:
                return self._unsaved.add(os.path.abspath(target))
        return original(source, target, **kwargs)

    def _remove(self, original: Callable[..., Any], path: Any, **kwargs: Any) -> Any:
        if isinstance(path, str | os.PathLike):
            if self._in_scratch(os.fspath(path)).exists():
                return original(self._in_scratch(os.fspath(path)))
            if os.path.abspath(path) in self._unsaved and not os.path.lexists(path):
                return None
        return original(path, **kwargs)

    def _in_scratch(self, path: str) -> Path:
        """The same for all ranks, so that one of them may write what the others read."""
        absolute = os.path.abspath(path)
        return self._hooks.scratch / f"{hashlib.sha256(absolute.encode()).hexdigest()[:8]}-{os.path.basename(absolute)}"

    def _holds_weights(self, saved: Any) -> bool:
        """Whether an object holds tensors of the model under training, or as much as it has."""
        if self._hooks.meter is None:
            return False
        parameters = list(self._hooks.meter.engine.module.parameters())
        own = {parameter.untyped_storage().data_ptr() for parameter in parameters} - {0}
        tensors = [tensor for tensor in _tensors(saved) if tensor.is_floating_point()]
        if any(not tensor.is_sparse and tensor.untyped_storage().data_ptr() in own for tensor in tensors):
            return True
        size = sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in parameters)
        return sum(tensor.numel() for tensor in tensors) >= size > 0

    def _summary_writer(self, original: Callable[..., Any], writer: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["log_dir"] = str(self._hooks.scratch / "tensorboard")
        original(writer, *args[1:], **kwargs)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.mkdir":
            path = (
                os.path.abspath(os.fsdecode(arguments[0]))
                if isinstance(arguments[0], str | bytes | os.PathLike)
                else ""
            )
            if path and not self._is_ours(path) and not os.path.lexists(path):
                self._folders.append(path)
        if event != "open" or not isinstance(arguments[0], str) or not isinstance(arguments[2], int):
            return
        if not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        path = os.path.abspath(arguments[0])
        if path in self._files or self._is_ours(path) or "__pycache__" in path:
            return
        # What a library writes elsewhere is a cache of its own.
        if path.startswith(self._working_dir) or self._users_caller():
            self._files.append(path)

    def _is_ours(self, path: str) -> bool:
        ours = (self._folder, "/dev/", "/proc/", os.environ.get("TORCH_EXTENSIONS_DIR", "/dev/"))
        return os.path.abspath(path).startswith(ours)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers and modules."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.state_dict().values()
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple | set):
        for inner in value:
            yield from _tensors(inner)
