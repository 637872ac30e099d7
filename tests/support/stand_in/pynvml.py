"""NVIDIA's management library on the stand-in: a clock, a power meter that runs with the wall clock, a process beside us.

`STAND_IN` may hold `others` (processes on each device), `busy` (share of time), `throttled`, and `nvml: false`.
"""

import time
from types import SimpleNamespace

from sitecustomize import GIVEN, TAKEN, uuid

NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
nvmlClocksThrottleReasonSwPowerCap = 4
WATTS = 350.0


def nvmlInit():
    if not GIVEN.get("nvml", True):
        raise RuntimeError("Driver Not Loaded")


def nvmlDeviceGetCount():
    return GIVEN["n"]


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetHandleByUUID(name):
    return next(index for index in range(GIVEN["n"]) if uuid(index) == name)


def nvmlDeviceGetUUID(handle):
    return uuid(handle)


def nvmlDeviceGetMemoryInfo(handle):
    return SimpleNamespace(free=int(GIVEN["memory_gib"] * 2**30) - (1 << 30))


def nvmlDeviceGetComputeRunningProcesses(handle):
    return [SimpleNamespace(pid=1)] * (GIVEN.get("others", 0) + TAKEN["initialised"])


def nvmlDeviceGetUtilizationRates(handle):
    return SimpleNamespace(gpu=round(100 * GIVEN.get("busy", 0.0)))


def nvmlDeviceGetClockInfo(handle, kind):
    return 1200


def nvmlDeviceGetMaxClockInfo(handle, kind):
    return 1980


def nvmlDeviceGetCurrentClocksThrottleReasons(handle):
    return nvmlClocksThrottleReasonSwPowerCap if GIVEN.get("throttled") else 0


def nvmlDeviceGetTotalEnergyConsumption(handle):
    return int(1e3 * WATTS * time.monotonic())


def nvmlDeviceGetPowerUsage(handle):
    return 1e3 * WATTS


def nvmlDeviceGetTemperature(handle, sensor):
    return 61
