"""Memory of a rank: the peak of each phase, and a limit on it."""

import contextlib
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from autotune.worker.agent import memory_watch
from autotune.worker.device import uuid_of
from autotune.worker.measure import malloc
from autotune.worker.measure.device_load import DeviceWatch
from autotune.worker.script.patching import patch

# DeepSpeed reserves buckets of 5e8 elements that small models hardly touch: two in fp32 take 4 GB of address space.
RLIMIT_SLACK_BYTES = 8 << 30
# Torch's function that sets a device's peaks to what is in use.
RESET = "reset_peak_memory_stats"


class Memory:
    """Peak memory by phase: on a CPU growth of resident memory, on a device what torch allocated.

    On a CPU memory is read in one more step, the last one: see `read_exactly`. Until then the C library keeps freed
    memory as it does in any training, so that peaks read high; they stand where no such step came. The timed steps, phase
    `steady`, are not read at all.

    Attributes:
        free_bytes: What was free of the ranks' devices before a script ran, in the order of the ranks; known to probes.
    """

    def __init__(self, accelerator: str, device_watch: DeviceWatch | None = None) -> None:
        self.accelerator = accelerator
        self.cuda, self.on_cpu = accelerator == "cuda", accelerator == "cpu"
        self._accelerator: Any = None
        if not self.on_cpu:
            from deepspeed.accelerator import get_accelerator

            self._accelerator = get_accelerator()
            self._outlive_resets()
        self.device_watch = device_watch
        self.free_bytes: tuple[int, ...] = ()
        self.peaks: dict[str, int] = {}
        self._phase = "initialize"
        self._reserved = self._in_use = self._allocated = 0
        self._replaced: set[str] = set()
        self.start_bytes = 0
        if self.on_cpu:
            malloc.leave_heaps_open()
        self._reset()
        self.start_bytes, self._in_use = resident_bytes(), 0

    def enter(self, phase: str) -> None:
        """Ends the current phase and starts another."""
        self._close()
        self._phase = phase
        self._reset()

    def read_exactly(self) -> None:
        """On a CPU: has what is freed from now on handed back at once, so that peaks are those of memory in use.

        Phases that come again are read anew. Steps are slower for it, so those that are timed come before.
        """
        self.enter("")
        malloc.keep_none()
        self._replaced = set(self.peaks) - {"initialize"}

    def finish(self) -> dict[str, int]:
        """Ends the last phase; returns peak bytes by phase."""
        self._close()
        again = [peak for phase, peak in self.peaks.items() if phase not in {"initialize", *self._replaced}]
        if again and "first_step" in self._replaced:
            # It cannot come again. What it allocates later steps do too, and they have the optimizer's state besides.
            self.peaks["first_step"] = min(self.peaks["first_step"], max(again))
        return self.peaks

    @property
    def least_bytes(self) -> int:
        """Returns what the peak is at least, so far."""
        return self._in_use if self.on_cpu else max([*self.peaks.values(), self._in_use])

    @property
    def reserved_bytes(self) -> int | None:
        """Returns the peak bytes that torch's caching allocator took from the device; None on a CPU."""
        return None if self.on_cpu else max(self._reserved, self._read("max_memory_reserved"))

    @property
    def alloc_retries(self) -> int | None:
        """Returns how often the allocator emptied its cache and tried again; None on a CPU."""
        if self.on_cpu:
            return None
        stats = self._accelerator.memory_stats() or {}
        return int(stats.get("num_alloc_retries", 0))

    @property
    def refusals(self) -> int:
        """Returns how often the device's memory ran out, also where a script went on; 0 on a CPU."""
        return 0 if self.on_cpu else int((self._accelerator.memory_stats() or {}).get("num_ooms", 0))

    @property
    def uuid(self) -> str:
        """Returns the identifier of this rank's CUDA device; empty where torch does not tell."""
        return uuid_of(torch.cuda.get_device_properties(torch.cuda.current_device()))

    def _read(self, counter: str) -> int:
        """A counter of the device's allocator; 0 where it has none."""
        return int(getattr(self._accelerator, counter)() or 0)

    def _outlive_resets(self) -> None:
        """Keeps the device's peaks where they are reset, as DeepSpeed does while it makes an engine, and many scripts do."""
        # Torch 2.9 brought the same for whatever device there is.
        for module in (getattr(torch, self.accelerator, None), getattr(torch, "accelerator", None)):
            for place in (module, getattr(module, "memory", None)):
                patch(place, RESET, self._on_reset)

    def _on_reset(self, reset: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._note()
        return reset(*args, **kwargs)

    def _note(self) -> None:
        self._allocated = max(self._allocated, self._read("max_memory_allocated"))
        self._reserved = max(self._reserved, self._read("max_memory_reserved"))

    def _close(self) -> None:
        if not self.on_cpu:
            self._accelerator.synchronize()
            self._note()
            peak = self._allocated
        elif self._phase in ("steady", ""):
            return
        else:
            peak = max(0, _status_bytes("VmHWM") - self.start_bytes)
        known = 0 if self._phase in self._replaced else self.peaks.get(self._phase, 0)
        self._replaced.discard(self._phase)
        self.peaks[self._phase] = max(peak, known)

    def _reset(self) -> None:
        if not self.on_cpu:
            self._accelerator.reset_peak_memory_stats()
            self._allocated = 0
            return
        if self._phase == "steady":
            return  # the steps that are timed keep what those before them freed, as in any training
        # Freed memory that stays resident would count as in use, and using it again would not count as growth.
        malloc.hand_back()
        self._in_use = max(self._in_use, resident_bytes() - self.start_bytes)
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

    memory_watch.answer(start_bytes + limit_bytes, look)
    return look
