"""Whether a process lives, told by its number and the moment it began: numbers are used again, and clocks are set."""

from __future__ import annotations

import os
from pathlib import Path

import psutil


def started(pid: int) -> str | None:
    """When a living process began: in ticks since the boot, which no clock that is set changes, where the system counts them."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None if Path("/proc/self/stat").exists() else _started_elsewhere(pid)
    fields = text[text.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def mark() -> str:
    """This process, so that others on this machine can ask for it."""
    return f"{os.getpid()}:{started(os.getpid()) or ''}"


def lives(process: str) -> bool:
    """Whether the process of a mark lives."""
    pid, _, since = process.partition(":")
    return pid.isdigit() and since != "" and started(int(pid)) == since


def _started_elsewhere(pid: int) -> str | None:
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.2f}"
    except psutil.Error:
        return None
