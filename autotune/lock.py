"""One run at a time for each study, and nothing of a trial interrupted half-way."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from autotune import UserError, files, segments
from autotune.executors.host import run_mark, sweep

# So many signals come through whatever is being told.
IMPATIENT = 3
# How often the lock of a study is asked for: whoever only looks has it for a moment, and several may look at once.
LOCK_TRIES = 25


class Terminated(KeyboardInterrupt):
    """SIGTERM came: everything ends as after Ctrl-C, but for the exit status.

    Attributes:
        status: The exit status, as a shell has it.
    """

    status = 128 + signal.SIGTERM


def status_of(stop: KeyboardInterrupt) -> int:
    """The exit status of a command that was stopped."""
    return stop.status if isinstance(stop, Terminated) else 128 + signal.SIGINT


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Puts Ctrl-C and SIGTERM off until the block is done, so that no trial is left half told; the third one goes through.

    Raises:
        KeyboardInterrupt: At the end, if one of them came meanwhile.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is interrupted
        return
    came: list[int] = []

    def stop() -> KeyboardInterrupt:
        return Terminated() if signal.SIGTERM in came else KeyboardInterrupt()

    def put_off(number: int, _: object) -> None:
        came.append(number)
        if len(came) >= IMPATIENT:  # a database that is away is waited for long
            raise stop()

    before = {number: signal.signal(number, put_off) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise stop()


@contextlib.contextmanager
def study_lock(folder: Path, name: str | None = None) -> Iterator[IO[str]]:
    """One run at a time for each study; what a killed run left is ended and removed.

    Args:
        folder: Where the run writes.
        name: The study's name; the folder's if not given.

    Raises:
        UserError: Another process runs this study.
        OSError: The folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    with open(path, "a+") as file:
        for tries_left in reversed(range(LOCK_TRIES)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if tries_left:
                    time.sleep(0.01)  # whoever only looks whether it runs has the lock for a moment
                    continue
                file.seek(0)
                pid, name = _owner(file), name or folder.name
                raise UserError(
                    f"study {name!r} is being run by process {pid}; `autotune status {name}` shows how far it is"
                ) from None
        _clear_away(folder, file)
        with files.naming(path):
            note_agent(file, run_mark())
        try:
            yield file
        finally:
            with contextlib.suppress(OSError):  # the lock counts, not what stands in it
                note_agent(file, "")


def _clear_away(folder: Path, file: IO[str]) -> None:
    """Ends and removes what the last run left, if it was killed: it would have taken its mark back."""
    file.seek(0)
    try:
        mark = json.loads(file.read() or "{}").get("agent")
    except (ValueError, AttributeError):
        mark = None
    if mark:
        sweep(mark)
        for path in segments.abandoned(since=os.fstat(file.fileno()).st_mtime):
            with contextlib.suppress(OSError):
                path.unlink()
    files.remove_drafts(folder)


def _owner(file: IO[str]) -> int | str:
    try:
        return int(json.loads(file.read() or "{}").get("pid", "?"))
    except (ValueError, TypeError, AttributeError):
        return "?"


def run_under_way(folder: Path) -> int | None:
    """The process that runs the study of a folder; None if none does."""
    try:
        with open(folder / ".lock") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = _owner(file)
                return owner if isinstance(owner, int) else 0  # it has not yet written down who it is
    except FileNotFoundError:
        pass
    return None


def note_agent(file: IO[str], mark: str) -> None:
    """Writes down, in one piece, whose processes to end, should this run be killed."""
    text = json.dumps({"pid": os.getpid(), "agent": mark}).encode()
    os.ftruncate(file.fileno(), 0)
    os.write(file.fileno(), text)  # opened to append, so it goes to the beginning
