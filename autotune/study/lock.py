"""The lock of a study: one run at a time, and a killed run's processes and files are removed before the next."""

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from autotune.errors import UserError
from autotune.system import files, shared_memory, temporary
from autotune.system.owner import Owner
from autotune.system.processes import run_mark, sweep

LOCK_TRIES = 25  # processes that only check whether a study runs hold its lock for a moment


@contextlib.contextmanager
def study_lock(folder: Path, name: str | None = None) -> Iterator[None]:
    """Locks a study for one run; ends and removes what a killed run left.

    Args:
        name: The study's name; by default the folder's.

    Raises:
        UserError: Another process runs this study, or the file system does not lock files.
        OSError: The folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    with _opened(path) as file:
        for tries_left in reversed(range(LOCK_TRIES)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if tries_left:
                    time.sleep(0.01)
                    continue
                name, by = name or folder.name, holder.shown if (holder := _holder(file)) else "a process"
                raise UserError(
                    f"study {name!r} is being run by {by}; `autotune status {name}` shows how far it is"
                ) from None
            except OSError as error:  # Lustre mounted without `-o flock`
                raise UserError(
                    f"{path} cannot be locked ({error.strerror}), which keeps two runs of a study apart: work in a folder on another file"
                    " system, or have this one mounted with locks"
                ) from None
        _clear_away(folder, file)
        with files.naming(path):
            os.ftruncate(file.fileno(), 0)
            # The file is opened to append, so this writes at its new end, the beginning.
            os.write(file.fileno(), json.dumps({"process": str(Owner.here()), "agent": run_mark()}).encode())
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the lock counts, not its text
                os.ftruncate(file.fileno(), 0)


def _opened(path: Path) -> IO[str]:
    """The file of a lock, which is written to: it must be no link to another file, and no pipe."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EEXIST, "Is a pipe, a socket or a device; remove it", str(path))
    return os.fdopen(descriptor, "a+")


def _clear_away(folder: Path, file: IO[str]) -> None:
    """Ends and removes what the last run left, if it was killed: any other run erases its mark."""
    holder = _holder(file)
    # With a process that lives the folder is a copy of one whose study runs.
    if (mark := _kept(file).get("agent")) and not (holder and holder.lives()):
        sweep(mark)
        temporary.remove_left(mark)
        for path in shared_memory.abandoned(since=os.fstat(file.fileno()).st_mtime):
            with contextlib.suppress(OSError):
                path.unlink()
    files.remove_drafts(folder)


def _kept(file: IO[str]) -> dict[str, str]:
    """What a run that goes on, or was killed, has written: its process, and the mark of its ranks' processes."""
    file.seek(0)
    try:
        return {key: str(value) for key, value in dict(files.json_of(file.read() or "{}")).items()}
    except (ValueError, TypeError):
        return {}


def _holder(file: IO[str]) -> Owner | None:
    """The process that holds a lock, or held it and was killed; None if it has not written who it is yet."""
    with contextlib.suppress(ValueError):
        return Owner.read(_kept(file).get("process", ""))
    return None


def run_under_way(folder: Path) -> int | None:
    """The PID of the process that runs the study of a folder; 0 if not yet known, None if none does."""
    try:
        with open(folder / ".lock", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return holder.pid if (holder := _holder(file)) else 0
    except OSError:  # there is no such file, or its file system locks none: then no run could begin
        pass
    return None
