"""Shared memory that ended processes left in /dev/shm: find the files that no living process uses."""

import contextlib
import os
import re
from collections.abc import Collection
from pathlib import Path

FOLDER = Path("/dev/shm")
# Prefixes of Python's SharedMemory and semaphores and of NCCL; random digits follow, not the PID.
RANDOM_PREFIXES = ("psm_", "sem.mp-", "nccl-")
DEEPSPEED_PREFIX = "deepspeed_allreduce_buffer_"  # the user's name follows, not the PID
# torch puts the PID first.
TORCH_NAME = re.compile(r"torch_(\d+)_")


def there() -> list[tuple[str, int]]:
    """Returns name and inode of this user's files in /dev/shm."""
    return [(name, found.st_ino) for name, found in _files()]


def left(pids: Collection[int], before: Collection[tuple[str, int]]) -> list[Path]:
    """Returns the files of shared memory that ended processes left behind.

    Either the name of such a file holds one of the PIDs, or a library chose the name and no process uses the file.

    Args:
        pids: PIDs of the ended processes.
        before: Name and inode of the files that were there before the processes.
    """
    numbers = {str(pid) for pid in pids}
    new = [name for name, inode in there() if (name, inode) not in before]
    named = [name for name in new if numbers & set(re.split("[-_.]", name))]
    random = [name for name in new if name not in named and name.startswith(RANDOM_PREFIXES)]
    return [FOLDER / name for name in (*named, *_unused(random))]


def abandoned(before: Collection[tuple[str, int]] = (), since: float = 0.0) -> list[Path]:
    """Returns files that a library seems to have made for a process that is dead, and that no living process uses.

    Args:
        before: Name and inode of files to leave out.
        since: Unix time in seconds; files that were last changed before it are left out.
    """
    found = []
    for name, status in _files():
        maker = TORCH_NAME.match(name)
        dead = name.startswith(RANDOM_PREFIXES) if maker is None else not _has_memory(maker[1])
        if dead and status.st_ctime >= since and (name, status.st_ino) not in before:
            found.append(name)
    return [FOLDER / name for name in _unused(found)]


def buffers() -> list[Path]:
    """Returns this user's buffers of DeepSpeed's collectives that no living process uses."""
    return [FOLDER / name for name in _unused([name for name, _ in there() if name.startswith(DEEPSPEED_PREFIX)])]


def _files() -> list[tuple[str, os.stat_result]]:
    found = []
    with contextlib.suppress(OSError), os.scandir(FOLDER) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.getuid():
                    found.append((entry.name, status))
    return found


def _has_memory(pid: str) -> bool:
    """Returns whether a process still has memory; one that is being killed or waits to be reaped has none."""
    try:
        return Path("/proc", pid, "cmdline").read_bytes() != b""
    except OSError:
        return False


def _unused(names: list[str]) -> list[str]:
    """Returns the files that no living process has mapped."""
    if not names:
        return []
    prefix, used = f"{FOLDER}/", set[str]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            lines = [line for line in os.fsdecode(maps.read_bytes()).splitlines() if prefix in line]
            used |= {line.partition(prefix)[2].removesuffix(" (deleted)") for line in lines}
    return [name for name in names if name not in used]
