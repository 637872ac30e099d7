"""Readings of a rank's device by NVIDIA's management library: others on it, clocks, throttling, power."""

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from autotune.trial.device_load import BUSY_SHARE, DeviceLoad

# Reasons for lower clocks that a tuner's user can do something about, by the name of NVML's constant.
THROTTLE = {
    "SwThermalSlowdown": "heat", "HwThermalSlowdown": "heat", "HwPowerBrakeSlowdown": "the power supply",
    "SwPowerCap": "the power limit", "HwSlowdown": "heat or power", "SyncBoost": "a slower device beside it",
}  # fmt: skip
# The longest time over which NVML averages a device's use, and between two looks.
REMEMBERED_S, LOOK_S = 1.0, 0.2
# Seconds between two readings of clock and throttling, which an idle device no longer shows, and the share in which a reason holds.
SAMPLE_S, LASTING = 0.5, 0.5


class DeviceWatch:
    """Readings of one device through `pynvml` (nvidia-ml-py): before the rank uses it, and over its timed steps.

    Everything is optional: without the library, in a container without its rights, or on a part of a card, what cannot
    be read is None.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._before: dict[str, tuple[int | None, int | None, float | None]] = {}
        self._handle: Any = None
        self._uuid_of_rank = ""
        self._began: tuple[float, float | None] | None = None
        self._samples: list[tuple[int, int | None]] = []
        self._ended = threading.Event()
        with contextlib.suppress(Exception):  # not installed, or no driver
            import pynvml

            pynvml.nvmlInit()
            self._nvml, until = pynvml, time.monotonic() + REMEMBERED_S
            # On the devices of other ranks, which may be there already, nothing is waited for.
            own = self._read(lambda _: torch.cuda._get_nvml_device_index(int(os.environ["LOCAL_RANK"])))
            for index in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                self._before[self._uuid(handle)] = self._occupation(handle, until if own in (None, index) else 0.0)

    def begin(self, uuid: str) -> None:
        """Starts to watch the device that this rank has; call it where the timed steps begin."""
        if self._nvml is None or not uuid:
            return
        self._handle = self._read(lambda nvml: nvml.nvmlDeviceGetHandleByUUID(uuid))
        self._uuid_of_rank, self._began = uuid, (time.monotonic(), self._energy_j())
        threading.Thread(target=self._sample, daemon=True).start()

    def end(self) -> DeviceLoad | None:
        """Returns the readings; None where there is no NVML. Call it where the timed steps end."""
        self._ended.set()
        if self._handle is None or self._began is None:
            return None
        handle, (began, energy_j) = self._handle, self._began
        free, others, used = self._before.get(self._uuid_of_rank, (None, None, None))
        spent_j, seconds = self._energy_j(), time.monotonic() - began
        samples = list(self._samples) or [self._reading()]
        clocks = [clock for _, clock in samples if clock is not None]
        watts = self._read(lambda nvml: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3)
        if energy_j is not None and spent_j is not None and seconds > 0:
            watts = (spent_j - energy_j) / seconds  # a mean, where the other is one moment's
        return DeviceLoad(
            uuid=self._uuid_of_rank,
            free_bytes=free,
            n_others=others,
            used_by_others=used if others else 0.0 if others == 0 else None,
            sm_clock_mhz=statistics.median_low(clocks) if clocks else None,
            max_sm_clock_mhz=self._read(lambda nvml: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
            throttled_by=self._throttled([mask for mask, _ in samples]),
            power_w=watts,
        )

    def _energy_j(self) -> float | None:
        joules: float | None = self._read(lambda n: n.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3)
        return joules

    def _sample(self) -> None:
        """Takes readings until the timed steps end: right after them the device is idle."""
        while not self._ended.wait(SAMPLE_S):
            self._samples.append(self._reading())

    def _reading(self) -> tuple[int, int | None]:
        """Returns the reasons for a lower clock, as bits, and the clock."""
        mask = self._read(lambda nvml: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)) or 0
        return mask, self._read(lambda nvml: nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM))

    def _throttled(self, masks: list[int]) -> tuple[str, ...]:
        """Returns the reasons that held in most readings."""
        found = []
        for name, why in THROTTLE.items():
            bit = getattr(self._nvml, f"nvmlClocksThrottleReason{name}", 0)
            found += [why] if sum(bool(mask & bit) for mask in masks) >= LASTING * len(masks) else []
        return tuple(dict.fromkeys(found))

    def _occupation(self, handle: Any, until: float) -> tuple[int | None, int | None, float | None]:
        """Free bytes, processes on it, and the share of time that it is busy.

        NVML says how busy it was in the last second, in which the trial before may have used it: until then it is asked again.
        """
        n_others = self._read(lambda nvml: len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)))
        used = self._used(handle)
        while n_others and used is not None and used > BUSY_SHARE and time.monotonic() < until:
            time.sleep(LOOK_S)
            used = self._used(handle)
        return self._read(lambda nvml: int(nvml.nvmlDeviceGetMemoryInfo(handle).free)), n_others, used

    def _used(self, handle: Any) -> float | None:
        used: float | None = self._read(lambda nvml: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0)
        return used

    def _uuid(self, handle: Any) -> str:
        uuid = self._nvml.nvmlDeviceGetUUID(handle)
        return uuid.decode() if isinstance(uuid, bytes) else str(uuid)

    def _read(self, of: Callable[[Any], Any]) -> Any:
        with contextlib.suppress(Exception):  # not supported on this card, or not permitted
            return of(self._nvml)
        return None
