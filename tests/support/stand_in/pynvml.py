"""NVIDIA's management library on the stand-in: a clock, a power meter that runs with the wall clock, a process beside us.

`STAND_IN` may hold `others` (processes on each device), `busy` (share of time), `throttled`, and `nvml: false`. As the
real one it answers only in the process that started it, not in one that was forked from that.
"""

import os
import time
from types import SimpleNamespace

from sitecustomize import GIVEN, TAKEN, load_driver, uuid

NVML_CLOCK_SM = 1
nvmlClocksThrottleReasonSwPowerCap = 4
WATTS = 350.0


def nvmlInit():
    if not GIVEN.get("nvml", True):
        raise RuntimeError("Driver Not Loaded")
    load_driver()
    TAKEN["nvml"] = os.getpid()


def nvmlDeviceGetCount():
    if TAKEN.get("nvml") != os.getpid():
        raise RuntimeError("Uninitialized")
    return GIVEN["n"]


def nvmlDeviceGetHandleByIndex(index):
    if TAKEN.get("nvml") != os.getpid():
        raise RuntimeError("Uninitialized")
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
