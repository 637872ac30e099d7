"""What NVIDIA's library tells of a rank's device, and what is left where it does not tell."""

import itertools
import sys
import threading
import types

import pytest

from autotune.worker.measure import device_load
from autotune.worker.measure.device_load import DeviceWatch


def refused(*_):
    raise RuntimeError("Not Supported")


@pytest.fixture
def nvml(monkeypatch):
    """A library that knows one device, and its clock; attributes may be replaced."""
    clock = types.SimpleNamespace(now=10.0)
    found = types.SimpleNamespace(
        clock=clock, NVML_CLOCK_SM=1, nvmlClocksThrottleReasonSwPowerCap=4,
        nvmlClocksThrottleReasonHwSlowdown=8, nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda _: "handle", nvmlDeviceGetHandleByUUID=lambda _: "handle",
        nvmlDeviceGetUUID=lambda _: b"GPU-a", nvmlDeviceGetMemoryInfo=lambda _: types.SimpleNamespace(free=70 << 30),
        nvmlDeviceGetComputeRunningProcesses=lambda _: [1, 2],
        nvmlDeviceGetUtilizationRates=lambda _: types.SimpleNamespace(gpu=40),
        nvmlDeviceGetClockInfo=lambda *_: 1200, nvmlDeviceGetMaxClockInfo=lambda *_: 1980,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: 4 | 8,
        nvmlDeviceGetTotalEnergyConsumption=lambda _: 1e3 * 300 * clock.now, nvmlDeviceGetPowerUsage=lambda _: 450e3,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", found)

    def sleep(seconds):
        clock.now += seconds

    monkeypatch.setattr(device_load, "time", types.SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    return found


def watched(nvml, uuid="GPU-a", seconds=2.0):
    watch = DeviceWatch()
    watch.begin(uuid)
    nvml.clock.now += seconds
    return watch.end()


def test_power_is_the_mean_over_the_timed_steps_and_others_are_those_before_the_rank(nvml):
    watch = DeviceWatch()
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda _: [1, 2, "this rank"]
    watch.begin("GPU-a")
    nvml.clock.now += 2.0
    load = watch.end()
    assert (load.uuid, load.free_bytes, load.n_others, load.used_by_others) == ("GPU-a", 70 << 30, 2, 0.4)
    assert load.power_w == pytest.approx(300)
    assert (load.sm_clock_mhz, load.max_sm_clock_mhz, load.throttled_by) == (
        1200,
        1980,
        ("the power limit", "heat or power"),
    )


def test_clock_and_throttling_are_read_while_the_device_works(nvml, monkeypatch):
    monkeypatch.setattr(device_load, "SAMPLE_S", 0.001)
    monkeypatch.setattr(nvml, "nvmlDeviceGetClockInfo", lambda *_: next(clocks))
    enough = threading.Event()

    def readings():
        yield from [1200] * 20
        enough.set()
        yield from itertools.repeat(1980)

    clocks = readings()
    watch = DeviceWatch()
    watch.begin("GPU-a")
    assert enough.wait(10)
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda _: 1  # idle
    load = watch.end()
    assert (load.sm_clock_mhz, load.throttled_by) == (1200, ("the power limit", "heat or power"))


@pytest.mark.parametrize(("others", "used", "waited"), [([1], 0.05, True), ([], 0.0, False)])
def test_what_the_trial_before_used_is_no_doing_of_others(nvml, others, used, waited):
    """NVML remembers a second; a device that stays busy is waited for no longer, and one of its own not at all."""
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda _: others
    nvml.nvmlDeviceGetUtilizationRates = lambda _: types.SimpleNamespace(gpu=90 if nvml.clock.now < 10.5 else 5)
    began = nvml.clock.now
    assert watched(nvml).used_by_others == used and (nvml.clock.now > began + 2.0) is waited
    nvml.nvmlDeviceGetUtilizationRates = lambda _: types.SimpleNamespace(gpu=90)
    assert watched(nvml).used_by_others == (0.9 if others else 0.0) and nvml.clock.now < began + 6.0


@pytest.mark.parametrize(
    ("local_rank", "chosen", "waited"), [("0", "2,3", False), ("1", "2,3", True), ("3", None, True)]
)
def test_a_rank_waits_for_its_own_device_to_be_idle_and_not_for_those_of_others(
    nvml, monkeypatch, local_rank, chosen, waited
):
    """Of the ranks of a trial that start together, and of trials beside it, each has one of the node's devices."""
    nvml.nvmlDeviceGetCount, nvml.nvmlDeviceGetHandleByIndex = lambda: 4, lambda index: index
    nvml.nvmlDeviceGetUUID = "GPU-{}".format
    nvml.nvmlDeviceGetUtilizationRates = lambda handle: types.SimpleNamespace(gpu=90 if handle == 3 else 0)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen) if chosen else monkeypatch.delenv(
        "CUDA_VISIBLE_DEVICES", raising=False
    )
    began = nvml.clock.now
    watch = DeviceWatch()
    assert (nvml.clock.now > began) is waited
    watch.begin("GPU-3")
    assert watch.end().used_by_others == 0.9


def test_a_device_without_an_energy_counter_tells_one_moments_power(nvml):
    nvml.nvmlDeviceGetTotalEnergyConsumption = refused
    assert watched(nvml).power_w == 450
    nvml.nvmlDeviceGetPowerUsage = refused
    assert watched(nvml).power_w is None
    assert watched(nvml, seconds=0.0).power_w is None


def test_alone_on_a_device_nobody_keeps_it_busy(nvml):
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda _: []
    assert watched(nvml).used_by_others == 0.0


def test_of_a_part_of_a_card_what_is_not_told_stays_unknown(nvml):
    for name in ("ClockInfo", "UtilizationRates", "CurrentClocksThrottleReasons"):
        setattr(nvml, f"nvmlDeviceGet{name}", refused)
    load = watched(nvml, "MIG-b")
    assert (load.uuid, load.free_bytes, load.n_others, load.used_by_others) == ("MIG-b", None, None, None)
    assert (load.sm_clock_mhz, load.throttled_by) == (None, ())


@pytest.mark.parametrize("without", ["library", "driver", "uuid", "handle"])
def test_without_the_library_or_its_driver_or_a_name_there_is_no_load(nvml, monkeypatch, without):
    if without == "library":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    elif without == "driver":
        nvml.nvmlInit = refused
    elif without == "handle":
        nvml.nvmlDeviceGetHandleByUUID = refused
    assert watched(nvml, "" if without == "uuid" else "GPU-a") is None
