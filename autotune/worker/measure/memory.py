"""Memory of a rank: the peak of each phase, and a limit on it."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable
from pathlib import Path

import torch

from autotune.worker.device import uuid_of
from autotune.worker.measure import malloc, watched
from autotune.worker.measure.device_load import DeviceWatch

# DeepSpeed reserves buckets of 5e8 elements that small models hardly touch: two in fp32 take 4 GB of address space.
RLIMIT_SLACK_BYTES = 8 << 30
# Until the first step has ended the C library is left alone, and finds the thresholds that a training has.
BEFORE_SECOND_STEP = ("initialize", "first_step")


class Memory:
    """Peak memory by phase: on a CPU growth of resident memory, on CUDA what torch allocated.

    On a CPU memory is that in use, as on a device: in the steps that are measured, freed memory is handed back at once. The
    first step and the timed ones, phase `steady`, run as a training does and are not measured: that costs up to 40 % of
    their time, and what the library would keep depends on the training.
    """

    def __init__(self, accelerator: str, device_watch: DeviceWatch | None = None) -> None:
        self.cuda = accelerator == "cuda"
        self.device_watch = device_watch
        self.peaks: dict[str, int] = {}
        self._phase = "initialize"
        self._reserved = 0
        self._own: malloc.Thresholds | None = None
        self._reset()
        self.start_bytes = resident_bytes()

    def enter(self, phase: str) -> None:
        """Ends the current phase and starts another."""
        self._close()
        self._phase = phase
        if not self.cuda and phase not in BEFORE_SECOND_STEP:
            self._own = self._own or malloc.thresholds()
            malloc.set_thresholds(self._own if phase == "steady" else malloc.NOTHING_KEPT)
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
        elif self._phase in ("first_step", "steady"):
            return
        else:
            peak = max(0, _status_bytes("VmHWM") - self.start_bytes)
        self.peaks[self._phase] = max(peak, self.peaks.get(self._phase, 0))

    def _reset(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        # Freed memory that stays resident would count as in use, and using it again would not count as growth.
        malloc.hand_back()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM; ru_maxrss cannot be reset


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
        malloc.hand_back()
        growth = resident_bytes() - start_bytes
        if growth > limit_bytes:
            on_excess(growth)

    watched.answer(start_bytes + limit_bytes, look)
    return look
