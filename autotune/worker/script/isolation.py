"""Files of a script under trial: saving is redirected or skipped, so that the user's folders stay as they were."""

import contextlib
import ctypes
import functools
import math
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from autotune.errors import UserError
from autotune.space.deepspeed import DTYPES, ZERO, DsConfig, at_path, precision_of, without_auto
from autotune.system import temporary
from autotune.trial.result import WRITES_FILES
from autotune.worker.containers import n_elements, tensors_in
from autotune.worker.script.context import ScriptContext
from autotune.worker.script.patching import after_import, patch, patch_everywhere, users_caller, users_frame
from autotune.worker.script.saved import put_back, set_aside
from autotune.worker.script.saved_files import PathList, SavedFiles, made_folders

SAVERS = ("save_checkpoint", "save_16bit_model", "save_fp16_model")
MAX_FILES_NAMED = 3
# Files of a checkpoint of DeepSpeed's that hold the script's own state, without and with ZeRO 3.
CLIENT_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
# What DeepSpeed has counted, and an engine goes on counting from.
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
READ_BACK = "what the script reads back has the weights and optimizer's states as they are then, not as it saved them: trials save no model"
# Endings of files that hold weights.
CHECKPOINTS = (".bin", ".ckpt", ".pt", ".pth", ".safetensors")
# Of `statx`: paths are those of this process, and the field that is wanted; the kernel leaves it 0 where it does not know.
AT_FDCWD, STATX_BTIME = -100, 0x800
# The clock of file systems ticks less often than that of Python.
CLOCK_S = 0.01
# Variables that hold the folders of libraries' caches.
CACHES = """HF_HOME HF_HUB_CACHE HF_DATASETS_CACHE HF_MODULES_CACHE TRANSFORMERS_CACHE TORCH_HOME TRITON_CACHE_DIR
    XDG_CACHE_HOME""".split()


class Isolation:
    """Keeps a script from saving, or redirects it into the trial's folder; lists the files it writes all the same."""

    def __init__(self, context: ScriptContext) -> None:
        self._context = context
        self._folder = str(context.recorder.folder.path.absolute()) + os.sep
        self._working_dir = str(Path(context.script.working_dir).absolute()) + os.sep
        self.files = SavedFiles(context.scratch)
        self._made = made_folders(context.scratch)
        self._written, self._noted = PathList(context.scratch / "written-files"), set[str]()
        self._saved: set[str] = set()
        self._kept: set[str] = set()
        self._began, self._spawned_at = time.time(), math.inf
        self._closed = False

    def install(self) -> None:
        """Patches functions that save, move and load files."""
        import deepspeed

        for name in SAVERS:
            patch(deepspeed.DeepSpeedEngine, name, self._context.saver(f"engine.{name}", "save_dir"))
        patch(deepspeed.DeepSpeedEngine, "load_checkpoint", functools.partial(_load_checkpoint, self._context))
        patch(torch, "save", self._save)
        patch(torch, "load", self._load)
        for name in ("rename", "replace"):
            patch(os, name, self._rename)
        for name in ("remove", "unlink"):
            patch(os, name, self._remove)
        patch(shutil, "rmtree", self._remove_tree)
        for name in ("copyfile", "copy", "copy2"):
            patch(shutil, name, self._copy)
        patch(shutil, "copytree", self._copy_tree)
        patch(os, "symlink", self._link)
        patch(os, "mkdir", self._make_folder)
        for owner, name in ((subprocess.Popen, "__init__"), (os, "system")):
            patch(owner, name, self._spawn)
        self.files.install()
        after_import("safetensors.torch", functools.partial(on_safetensors, self._context, self.files))
        after_import(
            "torch.distributed.checkpoint.state_dict_saver", functools.partial(on_sharded_saver, self._context)
        )
        sys.addaudithook(self._audit)
        self._context.at_end = self.close

    def close(self) -> None:
        """Lists the files that the script wrote elsewhere, by the names that they have now."""
        self._closed = True  # what this rank writes from now on is no file of the script's
        written = sorted(filter(os.path.lexists, self._written.paths()))  # by any rank
        if written:  # their names may hold the time of day
            folder = self._context.script.working_dir
            named = ", ".join(min(path, os.path.relpath(path, folder), key=len) for path in written[:MAX_FILES_NAMED])
            n_more = len(written) - MAX_FILES_NAMED
            self._context.once(f"{WRITES_FILES}{named}{f' and {n_more} more' * (n_more > 0)}")

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Saves into the scratch folder, where the script finds it; in place of weights, which cost time and space, next to nothing."""
        target = args[1] if len(args) > 1 else kwargs.get("f")
        if not isinstance(target, str | os.PathLike) or self._is_ours(os.fspath(target)):
            return original(*args, **kwargs)
        saved, meter = args[0] if args else kwargs["obj"], self._context.meter
        path = self.files.placed(target)
        self._saved.add(os.path.abspath(target))
        if meter is not None and _holds_weights(meter, saved):
            self._context.once("torch.save of the model is not carried out in trials")
            saved = set_aside(meter.engine, saved)
            if _holds_weights(meter, saved):  # as in an object of the script's
                path.write_bytes(b"")
                return None
        others = {name: value for name, value in kwargs.items() if name not in ("obj", "f")}
        return original(saved, path, *args[2:], **others)

    def _load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        source = args[0] if args else kwargs.get("f")
        if not isinstance(source, str | os.PathLike) or not self.files.replaces(source):
            return original(*args, **kwargs)
        saved = self.files.place(source)
        if not saved.stat().st_size:
            self._refuse(source)
        kwargs.pop("f", None)
        device = kwargs.get("map_location", next(iter(args[1:]), None))
        return self._whole(source, original(saved, *args[1:], **kwargs), device)

    def _whole(self, source: Any, read: Any, device: Any) -> Any:
        """Returns what a script reads back, with the weights that were not saved."""
        if self._context.meter is None:
            return read
        try:
            found, any_set_aside = put_back(self._context.meter.engine, read, device)
        except KeyError:
            self._refuse(source)
        if any_set_aside:
            self._context.once(READ_BACK)
        return found if any_set_aside else read

    def _refuse(self, source: Any) -> NoReturn:
        self._context.abort(UserError(f"the script reads {source} back, but trials do not save the model"))

    def _rename(self, original: Callable[..., Any], src: Any, dst: Any, **kwargs: Any) -> Any:
        """Follows a file that is written under another name and then moved into its place; leaves what was there before."""
        if isinstance(src, str | os.PathLike) and isinstance(dst, str | os.PathLike) and not kwargs:
            if self._is_saved(src):
                return self._follow(original, self.files.place(src), self.files.placed(dst))
            if _is_unsaved(src, folder=True):
                return None
            if self._is_old(src):
                return self._keep(src)
            if self._is_old(dst):
                self._keep(dst)
                _take_in(src, self.files.placed(dst))
                return self.files.moved(src, dst)
            here, there = os.path.abspath(src), os.path.abspath(dst)
            for path in self._written.paths():
                if path == here or path.startswith(here + os.sep):
                    self._note(there + path.removeprefix(here))
            if os.path.isdir(src):
                made = self._is_made(src)
                original(src, dst)
                if made:
                    self._made.add(dst)
                return self.files.moved(src, dst)
        return original(src, dst, **kwargs)

    def _copy(self, original: Callable[..., Any], src: Any, dst: Any, **kwargs: Any) -> Any:
        """Follows a file that is copied: one that is in the trial's folder stays there."""
        if isinstance(src, str | os.PathLike) and isinstance(dst, str | os.PathLike):
            place = os.path.join(dst, os.path.basename(src)) if os.path.isdir(dst) else os.fspath(dst)
            if self._is_saved(src):
                self._follow(functools.partial(original, **kwargs), self.files.place(src), self.files.placed(place))
                return place
            if _is_unsaved(src):
                return place
        return original(src, dst, **kwargs)

    def _copy_tree(self, original: Callable[..., Any], src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
        """Copies no checkpoint that was not saved, and none over a folder that was there before.

        Of `copytree`'s own default, bound before it was patched, one half alone would be patched.
        """
        if isinstance(src, str | os.PathLike) and isinstance(dst, str | os.PathLike) and users_caller():
            if not os.path.lexists(src):
                return dst
            if self._is_old(dst):
                self._keep(dst)
                return dst
        return original(src, dst, *args, **(kwargs if len(args) > 2 else {"copy_function": shutil.copy2, **kwargs}))

    def _link(self, original: Callable[..., Any], src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
        """Follows a link to a file that is in the trial's folder; a new one takes the place of none that was there before."""
        if isinstance(src, str | os.PathLike) and isinstance(dst, str | os.PathLike) and not kwargs.get("dir_fd"):
            saved = os.path.join(os.path.dirname(dst), src)
            if self._is_saved(saved):
                self.files.place(dst).unlink(missing_ok=True)
                return self._follow(original, self.files.place(saved), self.files.placed(dst))
            if os.path.abspath(dst) in self._kept or _is_unsaved(saved, folder=True):
                return None
        return original(src, dst, *args, **kwargs)

    def _remove(self, original: Callable[..., Any], path: Any, **kwargs: Any) -> Any:
        if isinstance(path, str | os.PathLike) and not kwargs:  # else it may not be one of the working folder
            if self._is_saved(path):
                self._saved.discard(os.path.abspath(path))
                return self._follow(original, self.files.place(path))
            if self._is_old(path):
                return self._keep(path)
            if _is_unsaved(path):  # as the oldest of those that a script keeps
                return None
        return original(path, **kwargs)

    def _remove_tree(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        """Leaves folders that were there before, as the checkpoints of an earlier training; a trial saves none in their place."""
        if isinstance(path, str | os.PathLike) and users_caller():
            if not os.path.lexists(path):
                return None
            if self._is_old(path):
                return self._keep(path)
            self.files.removed(path)
        return original(path, *args, **kwargs)

    def _make_folder(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> None:
        """Makes a folder, unless the script takes it for removed."""
        if not isinstance(path, str | os.PathLike) or os.path.abspath(path) not in self._kept:
            original(path, *args, **kwargs)

    def _spawn(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Notes the time from which on folders may be those of a process of the script's, and not of another training's."""
        if users_frame(through_libraries=True) is not None:
            self._spawned_at = min(self._spawned_at, time.time() - CLOCK_S)
        return original(*args, **kwargs)

    def _keep(self, path: str | os.PathLike[str]) -> None:
        self._kept.add(os.path.abspath(path))
        self._context.once(f"the script removes or replaces {path}, which was there before; trials leave it as it is")

    def _is_saved(self, path: str | os.PathLike[str]) -> bool:
        """Returns whether the script takes a file for saved that is in the trial's folder."""
        return os.path.abspath(path) in self._saved or os.path.lexists(self.files.place(path))

    def _follow(self, original: Callable[..., Any], *paths: Path) -> None:
        """Calls a function for files in the trial's folder; ranks that save under one name also move or link one file."""
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            original(*paths)

    def _is_old(self, path: str | os.PathLike[str]) -> bool:
        """Returns whether a user's call is about a folder, a checkpoint or a link that was there before the trial."""
        if not users_caller():
            return False
        if os.path.isdir(path) and not os.path.islink(path):
            return not self._is_made(path)
        named = os.path.islink(path) or os.fspath(path).endswith(CHECKPOINTS)
        return named and os.path.lexists(path) and os.lstat(path).st_mtime < self._began

    def _is_made(self, path: str | os.PathLike[str]) -> bool:
        """Returns whether the trial has made a folder, by a process that it started too, or one around it."""
        found = os.path.abspath(path)
        if _born_at(found) > self._spawned_at or self._is_ours(found):
            return True
        return any(f"{found}{os.sep}".startswith(f"{folder}{os.sep}") for folder in self._made.paths())

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Notes folders that are made and files that are opened for writing."""
        if event == "os.mkdir" and isinstance(arguments[0], str | bytes | os.PathLike):
            path = os.path.abspath(os.fsdecode(arguments[0]))
            if not self._is_ours(path) and not os.path.lexists(path):
                self._made.add(path)
        if event != "open" or not isinstance(arguments[0], str) or not isinstance(arguments[2], int):
            return
        if not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        self._note(os.path.abspath(arguments[0]))

    def _note(self, path: str) -> None:
        """Notes a file that is written, once; a library that writes elsewhere writes its own cache."""
        if self._closed or path in self._noted or self._is_ours(path) or "__pycache__" in path or _is_temporary(path):
            return
        if (path.startswith(self._working_dir) and not path.startswith(_caches())) or users_caller():
            self._noted.add(path)
            self._written.add(path)

    def _is_ours(self, path: str) -> bool:
        ours = (self._folder, "/dev/", "/proc/", os.environ.get("TORCH_EXTENSIONS_DIR", "/dev/"))
        return os.path.abspath(path).startswith(ours)


def _is_temporary(path: str) -> bool:
    """Returns whether a file lies in the trial's folder for temporary files, which is removed."""
    folder = Path(os.environ.get("TMPDIR", ""))
    return folder.name.startswith(temporary.PREFIX) and folder in Path(path).parents


def on_sharded_saver(context: ScriptContext, module: ModuleType) -> None:
    """Patches what saves a model in shards, a file for each rank, and perhaps over those of an earlier training."""
    names = ("save", "async_save")
    save, async_save = (context.saver(f"torch.distributed.checkpoint.{name}") for name in names)

    def saved_later(*args: Any, **kwargs: Any) -> Future[Any]:
        done = Future[Any]()
        done.set_result(async_save(*args, **kwargs))
        return done

    patch_everywhere(module, {"save": save, "async_save": saved_later})


def on_safetensors(context: ScriptContext, files: SavedFiles, module: ModuleType) -> None:
    """Patches what saves and reads tensors in a format that torch does not know: trials have torch do so."""

    def save(original: Callable[..., Any], saved: Any, filename: Any, *_args: Any, **_kwargs: Any) -> None:
        if users_caller():  # else a library's, which does not look for them
            torch.save(saved.state_dict() if isinstance(saved, torch.nn.Module) else saved, filename)
        context.once(f"safetensors.{original.__name__} is not carried out in trials")

    def load_file(original: Callable[..., Any], filename: Any, device: Any = "cpu", **kwargs: Any) -> Any:
        if not files.replaces(filename):
            return original(filename, device, **kwargs)
        return torch.load(filename, map_location=device, weights_only=True)

    def load_model(original: Callable[..., Any], model: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        if not files.replaces(filename):
            return original(model, filename, *args, **kwargs)
        return model.load_state_dict(torch.load(filename, weights_only=True))

    patch_everywhere(module, {"save_file": save, "save_model": save})
    patch_everywhere(module, {"load_file": load_file, "load_model": load_model})


def _load_checkpoint(
    context: ScriptContext,
    original: Callable[..., Any],
    engine: Any,
    load_dir: Any,
    tag: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Reads what the script itself put into a checkpoint; weights that another stage or more ranks saved cannot be loaded."""
    latest = Path(load_dir, "latest_universal" if engine.load_universal_checkpoint() else "latest")
    folder = Path(load_dir, str(tag or (latest.read_text().strip() if latest.is_file() else "")))
    file = next((folder / name for name in CLIENT_STATES if (folder / name).is_file()), None)
    if file is None:
        return original(engine, load_dir, tag, *args, **kwargs)  # which says that there is none
    context.once("trials train from the script's first weights, not from those of engine.load_checkpoint")
    saved = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
    for name in COUNTERS:  # scripts begin where these say
        if name in saved:
            setattr(engine, name, saved[name])
    if (meter := context.meter) is not None and meter.engine is engine:
        meter.batches.n_updates = engine.global_steps
    if not engine.load_universal_checkpoint():
        _tell_states(context, saved.get("ds_config"))
    return str(file), {name: value for name, value in saved.items() if name not in ("module", "optimizer")}


def _tell_states(context: ScriptContext, saved_with: Any) -> None:
    """Notes it if DeepSpeed loads a checkpoint no more that the script goes on from, once it trains as the candidate."""
    if context.candidate is None or not isinstance(saved_with, dict):
        return
    before, now = _states(saved_with), _states(context.request.ds_config)
    if before != now:
        context.changed(
            f"Checkpoint: the one that `engine.load_checkpoint` reads was saved at {before}, and DeepSpeed does not load"
            f" it with its optimizer's states at {now}: begin a training so, or tune the one that goes on from it with"
            " stage and type of the weights as they are (`--space batch,checkpointing`)."
        )


def _is_unsaved(path: str | os.PathLike[str], *, folder: bool = False) -> bool:
    """Returns whether a user's call is about a checkpoint, or perhaps its folder, that is not there, as of `save_pretrained`."""
    named = os.path.splitext(path)[1] in (*CHECKPOINTS, *[""] * folder)
    return named and not os.path.lexists(path) and users_caller() is not None


def _born_at(path: str) -> float:
    """Returns the time at which a file or folder was made, which Python's `os.stat` does not tell; 0 where Linux does not, either."""
    libc, found = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    if not hasattr(libc, "statx") or libc.statx(AT_FDCWD, os.fsencode(path), 0, STATX_BTIME, found):
        return 0.0
    _, seconds, nanoseconds = struct.unpack_from("=I76xqI", found)
    return float(seconds + nanoseconds / 1e9)


def _take_in(path: str | os.PathLike[str], place: Path) -> None:
    """Moves a file, link or folder to a place in the trial's folder, where another one may be that was moved there before."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    shutil.move(path, place)


def _holds_weights(meter: Any, saved: Any) -> bool:
    """Returns whether an object holds tensors of the trained model, or as many numbers as it has."""
    parameters = list(meter.engine.module.parameters())
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters} - {0}
    tensors = [tensor for tensor in tensors_in(saved) if tensor.is_floating_point()]
    plain = (tensor for tensor in tensors if tensor.layout is torch.strided)  # others have no storage of their own
    if any(tensor.untyped_storage().data_ptr() in own for tensor in plain):
        return True
    size = sum(map(n_elements, parameters))
    return sum(tensor.numel() for tensor in tensors) >= size > 0


def _states(config: DsConfig) -> str:
    """Returns what files of an optimizer's states go by, in words: DeepSpeed loads those of no other kind.

    ZeRO 1 and 2 read each other's, and autocast has the weights of fp32.
    """
    stage, precision = at_path(config, f"{ZERO}stage") or 0, precision_of(without_auto(config))
    return f"ZeRO {'1 or 2' if stage in (1, 2) else stage} with {precision if precision in DTYPES else 'fp32'} weights"


def _caches() -> tuple[str, ...]:
    """Returns the folders of libraries' caches that the environment names."""
    return tuple(os.path.abspath(os.environ[name]) + os.sep for name in CACHES if os.environ.get(name))
