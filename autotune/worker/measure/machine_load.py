"""Processor time that other processes take while a trial is timed."""

import contextlib
import os
import platform
import resource
import time
from pathlib import Path

import psutil


def machine_id() -> str:
    """Returns an identifier of this machine: the kernel's boot id, or the host name."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()


def own_cpu_s() -> float:
    """Returns the CPU seconds of this process and of all that it started, as a loader's workers."""
    found = time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])  # those that have ended
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found += sum(child.cpu_times()[:2])
    return found


class Busyness:
    """CPU time of other processes, on the cores that this one may use, since this object was made.

    Attributes:
        n_cores: Their number.
    """

    def __init__(self) -> None:
        self._start, self.n_cores = self._read(), len(os.sched_getaffinity(0))

    def cores_used_by_others(self, own_cpu_s: float) -> float:
        """Returns the cores that other processes kept busy on average, given the CPU seconds of the trial's own."""
        (busy, wall), (busy_before, wall_before) = self._read(), self._start
        elapsed = wall - wall_before
        return max(0.0, (busy - busy_before - own_cpu_s) / elapsed) if elapsed > 0 else 0.0

    @staticmethod
    def _read() -> tuple[float, float]:
        each, own = psutil.cpu_times(percpu=True), os.sched_getaffinity(0)
        # Those that are offline are missing, and then a place in the list is no core's number.
        mine = [each[core] for core in own] if len(each) > max(own) else each
        names = ("user", "nice", "system", "irq", "softirq", "steal")
        return sum(getattr(times, name, 0.0) for times in mine for name in names), time.monotonic()
