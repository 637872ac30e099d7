"""Processor time that other processes take while a trial is timed."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from pathlib import Path


def machine_id() -> str:
    """An identifier of this machine: the kernel's boot id, or the host name."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()


class Busyness:
    """CPU time of other processes since this object was made."""

    def __init__(self) -> None:
        self._start = self._read()

    def cores_used_by_others(self, own_cpu_s: float) -> float:
        """Cores that other processes kept busy on average.

        Args:
            own_cpu_s: CPU seconds of the trial's own processes meanwhile.
        """
        (busy, wall), (busy_before, wall_before) = self._read(), self._start
        elapsed = wall - wall_before
        return max(0.0, (busy - busy_before - own_cpu_s) / elapsed) if elapsed > 0 else 0.0

    @staticmethod
    def _read() -> tuple[float, float]:
        try:
            with open("/proc/stat") as file:
                ticks = [int(value) for value in file.readline().split()[1:]]
        except OSError:
            return 0.0, time.monotonic()
        user, nice, system, _idle, _iowait, irq, softirq, steal = (ticks + [0] * 8)[:8]
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK"), time.monotonic()
