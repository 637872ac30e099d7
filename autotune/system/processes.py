"""Processes: tell when one started, find its descendants, end it, kill those with a mark in their environment."""

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

# Variable of the environment that every process of a trial inherits; its value is a mark.
MARK = "AUTOTUNE_AGENT"
_run_marks: dict[int, str] = {}
PROC = Path("/proc")
# Processes that a trial may have on one machine (loaders, compilers, managers): a base, and more by core and rank.
MOST, MOST_PER_CORE, MOST_PER_RANK = 256, 32, 64
VARIABLE = "AUTOTUNE_MOST_PROCESSES"
# Sweeps end after this many rounds; each finds the processes that were started during the one before.
MOST_SWEEPS = 500


def started(pid: int) -> str | None:
    """Returns the start time of a living process in ticks since boot, which setting the clock does not change."""
    try:
        text = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def age_s() -> float:
    """Returns the seconds since this process began, imports included; 0 where that is unknown."""
    since = started(os.getpid())
    if since is None:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(since) / os.sysconf("SC_CLK_TCK"))


def stop(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Ends a child by SIGTERM, by SIGKILL where it has not ended after some seconds; one that has ended is left alone."""
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run_mark() -> str:
    """Returns the prefix of the marks of all executors of this process; a later run can sweep all of them by it."""
    return _run_marks.setdefault(os.getpid(), uuid.uuid4().hex)


def new_mark() -> str:
    """Returns a mark for the processes of one server."""
    return f"{run_mark()}.{uuid.uuid4().hex[:8]}"


def sweep(mark: str) -> list[int]:
    """Kills every process of this user whose mark is the given one or begins with it; returns their PIDs."""
    killed = set[int]()
    for _ in range(MOST_SWEEPS):
        found = set()
        for pid in marked(mark):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                found.add(pid)
        if not found:
            break
        killed |= found
        time.sleep(0.01)
    return sorted(killed)


def marked(mark: str) -> Iterator[int]:
    """Yields the PIDs of this user's processes whose mark is the given one or begins with it, but for this one."""
    wanted = f"{MARK}={mark}".encode()
    for name in filter(str.isdigit, os.listdir(PROC)):
        with contextlib.suppress(OSError):
            variables = (PROC / name / "environ").read_bytes().split(b"\0")
            if int(name) != os.getpid() and any(v == wanted or v.startswith(wanted + b".") for v in variables):
                yield int(name)


def descendants(root: int, *, dead: bool = False) -> list[int]:
    """Returns the PIDs of living processes below `root`; with `dead` also of those not reaped yet."""
    import psutil

    found = list[psutil.Process]()
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(root).children(recursive=True)
    return [each.pid for each in found if dead or started(each.pid) is not None]


def most(ranks: int) -> int:
    """Returns how many processes a trial with this number of ranks on this machine may have."""
    stated = os.environ.get(VARIABLE, "")
    cores = len(os.sched_getaffinity(0))
    return int(stated) if stated.isdigit() else MOST + MOST_PER_CORE * cores + MOST_PER_RANK * ranks


def n_tasks() -> int:
    """Returns the number of processes and threads of the machine, from one small file; 0 if it is unknown."""
    try:
        return int((PROC / "loadavg").read_text().split()[3].partition("/")[2])
    except (OSError, ValueError, IndexError):
        return 0
