"""The processes of a trial: which live below the agent, and whether they are too many."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
# So many processes a trial may have on one machine, and so many more for each core and each rank: loaders, compilers, managers.
MOST, MOST_PER_CORE, MOST_PER_RANK = 256, 32, 64
VARIABLE = "AUTOTUNE_MOST_PROCESSES"


def most(ranks: int) -> int:
    """How many processes the trial of so many ranks on this machine may have."""
    stated = os.environ.get(VARIABLE, "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(stated) if stated.isdigit() else MOST + MOST_PER_CORE * cores + MOST_PER_RANK * ranks


def descendants(root: int, *, dead: bool = False) -> list[int]:
    """Living processes below `root`, and with `dead` those too that are about to die or wait to be reaped."""
    if not (PROC / "self" / "stat").exists():
        return _descendants_elsewhere(root, dead=dead)
    children: dict[int, list[tuple[int, bool]]] = {}
    for pid, parent, lives in _every():
        children.setdefault(parent, []).append((pid, lives))
    found, below = [], [root]
    while below:
        for pid, lives in children.get(below.pop(), ()):
            below.append(pid)
            if lives or dead:
                found.append(pid)
    return found


def n_tasks() -> int:
    """Processes and threads of the whole machine, for the price of one small file; 0 where that is not known."""
    try:
        return int((PROC / "loadavg").read_text().split()[3].partition("/")[2])
    except (OSError, ValueError, IndexError):
        return 0


class Watch:
    """Sees when a trial's processes become too many, whether they keep to its process group or not.

    They are counted only where the machine's number of tasks has grown by as many as would make it so.

    Args:
        limit: Processes that it may have.
        others: Those below this process that are not the trial's.
    """

    def __init__(self, limit: int, others: int) -> None:
        self.limit, self._others = limit, others
        self._allowed = n_tasks() + limit

    def too_many(self) -> bool:
        """Whether they are now."""
        tasks = n_tasks()
        if tasks <= self._allowed:
            return False
        n = len(descendants(os.getpid())) - self._others
        self._allowed = tasks + max(0, self.limit - n)
        return n > self.limit


def _every() -> Iterator[tuple[int, int, bool]]:
    """Each process, its parent, and whether it lives."""
    for name in os.listdir(PROC):
        if name.isdigit():
            # It may end in between.
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/stat", "rb") as file:
                text = file.read()
                state, parent = text[text.rindex(b")") + 2 :].split(None, 2)[:2]
                yield int(name), int(parent), state not in (b"Z", b"X", b"x")


def _descendants_elsewhere(root: int, *, dead: bool) -> list[int]:
    import psutil

    found = []
    for process in psutil.Process(root).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if dead or process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found
