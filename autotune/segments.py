"""Shared memory that processes leave behind: which files in /dev/shm belong to nobody any more."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection
from pathlib import Path

FOLDER = Path("/dev/shm")
# What Python's SharedMemory and semaphores and NCCL call their files: numbers drawn at random, not the process's.
NAMELESS = ("psm_", "sem.mp-", "nccl-")
# What torch calls its own: the process's number comes first.
OF_A_PROCESS = re.compile(r"torch_(\d+)_")


def there() -> list[tuple[str, int]]:
    """Name and inode of this user's files in /dev/shm."""
    return [(name, found.st_ino) for name, found in _files()]


def left(pids: Collection[int], before: Collection[tuple[str, int]]) -> list[Path]:
    """Files of processes that have ended: new, and named for one of them, or by a library for nobody alive.

    Args:
        pids: The processes.
        before: What was there before them, by name and inode.
    """
    numbers = {str(pid) for pid in pids}
    new = [name for name, inode in there() if (name, inode) not in before]
    named = [name for name in new if numbers & set(re.split("[-_.]", name))]
    nameless = [name for name in new if name not in named and name.startswith(NAMELESS)]
    return [FOLDER / name for name in (*named, *_unused(nameless))]


def abandoned(before: Collection[tuple[str, int]] = (), since: float = 0.0) -> list[Path]:
    """Files whose makers nobody has written down: called as libraries call theirs, their process dead, and used by nobody alive.

    Args:
        before: What is older, by name and inode.
        since: Unix time before which files were made that are older, by the clock that stamps them.
    """
    found = []
    for name, status in _files():
        maker = OF_A_PROCESS.match(name)
        dead = name.startswith(NAMELESS) if maker is None else not _lives(maker[1])
        if dead and status.st_ctime >= since and (name, status.st_ino) not in before:
            found.append(name)
    return [FOLDER / name for name in _unused(found)]


def _files() -> list[tuple[str, os.stat_result]]:
    found = []
    with contextlib.suppress(OSError), os.scandir(FOLDER) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.getuid():
                    found.append((entry.name, status))
    return found


def _lives(pid: str) -> bool:
    """Whether a process has memory of its own; one that is being killed, or waits to be reaped, has none any more."""
    try:
        return Path("/proc", pid, "cmdline").read_bytes() != b""
    except OSError:
        return False


def _unused(names: list[str]) -> list[str]:
    """Those that no living process has mapped."""
    if not names:
        return []
    mark, used = f"{FOLDER}/", set[str]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            used |= {
                line.partition(mark)[2].removesuffix(" (deleted)")
                for line in maps.read_text().splitlines()
                if mark in line
            }
    return [name for name in names if name not in used]
