"""Memory of a rank: the peak of each phase, and a limit on it."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from autotune.worker.measure.device_load import DeviceWatch

# DeepSpeed reserves buckets of 5e8 elements that small models hardly touch: two in fp32 take 4 GB of address space.
RLIMIT_SLACK_BYTES = 8 << 30
# Looks at resident memory wake a thread that takes Python's lock (every 10 ms they made steps 2 % longer), so they come
# as late as the memory left permits: a rank gets new pages at a few GB/s, a whole machine at some tens.
MIN_WATCH_INTERVAL_S, MAX_WATCH_INTERVAL_S, TRIM_INTERVAL_S = 0.01, 1.0, 0.2
FASTEST_GROWTH_BYTES_PER_S = 16e9
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


class Memory:
    """Peak memory by phase: on a CPU growth of resident memory, on CUDA what torch allocated.

    On a CPU the timed steps, phase `steady`, are not measured: see `keep_freed_memory`.
    """

    def __init__(self, accelerator: str, device_watch: DeviceWatch | None = None) -> None:
        self.cuda = accelerator == "cuda"
        self.device_watch = device_watch
        self.peaks: dict[str, int] = {}
        self._phase = "initialize"
        self._reserved = 0
        keep_freed_memory(False)
        self._reset()
        self.start_bytes = resident_bytes()

    def enter(self, phase: str) -> None:
        """Ends the current phase and starts another."""
        self._close()
        self._phase = phase
        keep_freed_memory(phase == "steady")
        self._reset()

    def finish(self) -> dict[str, int]:
        """Ends the last phase; returns peak bytes by phase."""
        self._close()
        return self.peaks

    @property
    def reserved_bytes(self) -> int | None:
        """Returns the peak bytes that CUDA's caching allocator took from the device; None on a CPU."""
        return max(self._reserved, torch.cuda.max_memory_reserved()) if self.cuda else None

    @property
    def alloc_retries(self) -> int | None:
        """Returns how often CUDA's allocator emptied its cache and tried again; None on a CPU."""
        return int(torch.cuda.memory_stats().get("num_alloc_retries", 0)) if self.cuda else None

    @property
    def uuid(self) -> str:
        """Returns the identifier of this rank's device; empty on a CPU and where torch does not tell."""
        if not self.cuda:
            return ""
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        uuid = str(getattr(properties, "uuid", ""))
        return uuid if not uuid or uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"

    def _close(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
            self._reserved = max(self._reserved, torch.cuda.max_memory_reserved())
        elif self._phase == "steady":
            return
        else:
            peak = max(0, _status_bytes("VmHWM") - self.start_bytes)
        self.peaks[self._phase] = max(peak, self.peaks.get(self._phase, 0))

    def _reset(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        # Freed memory that stays resident would count as in use, and using it again would not count as growth.
        hand_back_freed_memory()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM; ru_maxrss cannot be reset


def keep_freed_memory(keep: bool) -> None:
    """Lets the C library keep freed tensors for reuse, as it does by default, or return them to the system at once.

    If freed memory is kept, resident memory shows the most that was ever in use; if it is returned, the memory in use,
    as on a GPU: 265 and 183 MiB for the example GPT at micro-batch 32, 265 and 100 MiB with checkpointing. But
    returning it costs 40 % more CPU time for page faults, so memory and time are measured in different steps.
    """
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20 if keep else 128 << 10)  # 32 MiB is where glibc's own adaptation ends
        libc.mallopt(M_TRIM_THRESHOLD, 64 << 20 if keep else 128 << 10)


def hand_back_freed_memory() -> None:
    """Makes the C library return freed memory to the system."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Returns the resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def watch_interval_s(left_bytes: int) -> float:
    """Returns the wait before the next look: too short for a rank to use up the memory it has left."""
    return min(MAX_WATCH_INTERVAL_S, max(MIN_WATCH_INTERVAL_S, left_bytes / FASTEST_GROWTH_BYTES_PER_S))


def limit_host_memory(start_bytes: int, limit_bytes: int, on_excess: Callable[[int], None]) -> Callable[[], float]:
    """Limits the growth of this process, as a device with limited memory does.

    A thread looks at resident memory without what the C library keeps for reuse. RLIMIT_DATA refuses a huge allocation
    that the thread could not see in time.

    Args:
        start_bytes: Resident bytes that do not count.
        limit_bytes: Growth allowed.
        on_excess: Called with the growth; it must end the process.

    Returns:
        A function that looks once more, for the end: a short trial, or one starved of cores, may exceed the limit
        between two looks of the thread.
    """
    ceiling = _status_bytes("VmData") + limit_bytes + RLIMIT_SLACK_BYTES
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (ceiling, ceiling))

    def look() -> float:
        """Returns the seconds until the next look."""
        left = limit_bytes - (resident_bytes() - start_bytes)
        if left >= 0:
            return watch_interval_s(left)
        hand_back_freed_memory()
        growth = resident_bytes() - start_bytes
        if growth > limit_bytes:
            on_excess(growth)
        return TRIM_INTERVAL_S  # returned more often, freed memory would make steps slower by page faults

    def watch() -> None:
        while True:
            time.sleep(look())

    threading.Thread(target=watch, name="autotune-memory", daemon=True).start()
    return look
