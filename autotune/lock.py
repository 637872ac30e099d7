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

from autotune import UserError
from autotune.executors.host import sweep

# So many signals come through whatever is being told.
IMPATIENT = 3
# How often the lock of a study is asked for.
LOCK_TRIES = 5


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

    def put_off(number: int, _: object) -> None:
        came.append(number)
        if len(came) >= IMPATIENT:  # a database that is away is waited for long
            raise KeyboardInterrupt

    before = {number: signal.signal(number, put_off) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


@contextlib.contextmanager
def study_lock(folder: Path) -> Iterator[IO[str]]:
    """One run at a time for each study; what a killed run left running is ended.

    Raises:
        UserError: Another process runs this study.
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
                pid = (json.loads(file.read() or "{}")).get("pid", "?")
                raise UserError(
                    f"study {folder.name!r} is being run by process {pid}; `autotune status {folder.name}` shows how far it is"
                ) from None
        file.seek(0)
        with contextlib.suppress(json.JSONDecodeError):
            left = json.loads(file.read() or "{}")
            if left.get("agent"):
                sweep(left["agent"])
        note_agent(file, "")
        yield file


def run_under_way(folder: Path) -> int | None:
    """The process that runs the study of a folder; None if none does."""
    try:
        with open(folder / ".lock") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                with contextlib.suppress(json.JSONDecodeError):
                    return int(json.loads(file.read() or "{}").get("pid", 0))
                return 0  # it has not yet written down who it is
    except FileNotFoundError:
        pass
    return None


def note_agent(file: IO[str], mark: str) -> None:
    """Writes down whose processes to end, should this run be killed."""
    file.seek(0)
    file.truncate()
    file.write(json.dumps({"pid": os.getpid(), "agent": mark}))
    file.flush()
