"""Processor time that other processes take while a trial is timed."""

import contextlib
import os
import resource
import time
from pathlib import Path

import psutil


def own_cpu_s() -> float:
    """Returns the CPU seconds of this process and of all that it started, as a loader's workers."""
    found = time.process_time() + ended_cpu_s()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found += sum(child.cpu_times()[:2])
    return found


def ended_cpu_s() -> float:
    """Returns the CPU seconds of the processes that this one started and that have ended."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def waits_s() -> dict[str, float]:
    """Returns the seconds in which each thread of this process, and of those that it started, was ready and had no core.

    Empty where the kernel does not tell. By its file `schedstat`: time on a core, time waited for one
    (Documentation/scheduler/sched-stats.rst of Linux).
    """
    found = {}
    for pid in (os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))):
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError, IndexError):  # it may end meanwhile
                found[path.parent.name] = int(path.read_text().split()[1]) / 1e9
    return found


class Busyness:
    """CPU time of other processes, on the cores that this one may use, since this object was made.

    Attributes:
        n_cores: Their number.
    """

    def __init__(self) -> None:
        self._start, self.n_cores = self._read(), len(os.sched_getaffinity(0))
        self._waits_s, self._ended_s = waits_s(), ended_cpu_s()

    def waited(self) -> float:
        """Returns the share of the time in which that thread of `waits_s` waited for a core that waited most; 1 where that is not known.

        What the host of a virtual machine gave to others counts as far as the kernel knows of it.
        """
        (_, stolen, wall), (_, stolen_before, wall_before) = self._read(), self._start
        now_s, elapsed = waits_s(), wall - wall_before
        if not now_s or elapsed <= 0 or ended_cpu_s() > self._ended_s:  # what ended tells nothing any more
            return 1.0
        waited_s = max(wait - self._waits_s.get(thread, 0.0) for thread, wait in now_s.items())
        return (waited_s + (stolen - stolen_before) / self.n_cores) / elapsed

    def cores_used_by_others(self, own_cpu_s: float) -> float:
        """Returns the cores that other processes kept busy on average, given the CPU seconds of the trial's own."""
        (busy, _, wall), (busy_before, _, wall_before) = self._read(), self._start
        elapsed = wall - wall_before
        return max(0.0, (busy - busy_before - own_cpu_s) / elapsed) if elapsed > 0 else 0.0

    @staticmethod
    def _read() -> tuple[float, float, float]:
        """Returns the CPU seconds of all processes, those of other guests of the host among them, and the time."""
        each, own = psutil.cpu_times(percpu=True), os.sched_getaffinity(0)
        # Those that are offline are missing, and then a place in the list is no core's number.
        mine = [each[core] for core in own] if len(each) > max(own) else each
        names = ("user", "nice", "system", "irq", "softirq", "steal")
        stolen = sum(getattr(times, "steal", 0.0) for times in mine)
        return sum(getattr(times, name, 0.0) for times in mine for name in names), stolen, time.monotonic()
