"""Memory of a rank: the peak of each phase, and a limit on it."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from collections.abc import Callable
from pathlib import Path

import torch

from autotune.worker.device import uuid_of
from autotune.worker.measure import watched
from autotune.worker.measure.device_load import DeviceWatch

# DeepSpeed reserves buckets of 5e8 elements that small models hardly touch: two in fp32 take 4 GB of address space.
RLIMIT_SLACK_BYTES = 8 << 30
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
        return uuid_of(torch.cuda.get_device_properties(torch.cuda.current_device()))

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


def limit_host_memory(start_bytes: int, limit_bytes: int, on_excess: Callable[[int], None]) -> Callable[[], None]:
    """Limits the growth of this process, as a device with limited memory does.

    The supervisor watches resident memory; RLIMIT_DATA refuses a huge allocation that it could not see in time.

    Args:
        start_bytes: Resident bytes that do not count.
        limit_bytes: Growth allowed.
        on_excess: Called with the growth; it must end the process.

    Returns:
        A function that looks once more, for the end: a short trial, or one starved of cores, may exceed the limit
        between two looks.
    """
    ceiling = _status_bytes("VmData") + limit_bytes + RLIMIT_SLACK_BYTES
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (ceiling, ceiling))

    def look() -> None:
        """Compares the growth with the limit, without what the C library keeps for reuse."""
        if resident_bytes() - start_bytes <= limit_bytes:
            return
        hand_back_freed_memory()
        growth = resident_bytes() - start_bytes
        if growth > limit_bytes:
            on_excess(growth)

    watched.answer(start_bytes + limit_bytes, look)
    return look
