"""Memory in use in each phase, its limit, and the load of the machine by others."""

import ctypes
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from support.zoo import wait_until

from autotune.worker.agent import memory_watch
from autotune.worker.measure import machine_load, malloc, memory
from autotune.worker.measure.breakdown import Breakdown

MIB = 1 << 20


def mebibytes(n):
    return [torch.ones(MIB // 4) for _ in range(n)]


def test_peak_memory_is_that_in_use_in_each_phase_but_the_timed_one():
    watch = memory.Memory("cpu")
    for phase, n in (("large", 48), ("small", 4), ("steady", 96)):
        watch.enter(phase)
        torch.ones(n * MIB // 4).sum()
    peaks = watch.finish()
    assert peaks["large"] - peaks["small"] > 36 * MIB and "steady" not in peaks


@pytest.fixture
def keeping():
    """The C library keeps what is freed, also after the test."""
    libc = ctypes.CDLL(None)

    def keep():
        libc.mallopt(malloc.M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(malloc.M_TRIM_THRESHOLD, 64 << 20)

    keep()
    yield
    keep()


def test_memory_that_was_freed_before_counts_when_it_is_used_again(keeping):
    """The C library keeps freed chunks below a living one; counted as resident at the start, they hide the growth."""
    tensors = mebibytes(64)
    keep, tensors = tensors[-1], []
    watch = memory.Memory("cpu")
    watch.enter("again")
    again = mebibytes(64)
    assert watch.finish()["again"] > 48 * MIB and keep is not None and len(again) == 64


def test_what_an_earlier_phase_freed_is_not_in_use(keeping):
    watch = memory.Memory("cpu")
    watch.enter("many")
    tensors = mebibytes(64)
    keep, tensors = tensors[::8], []
    watch.enter("few")
    torch.ones(MIB // 4).sum()
    peaks = watch.finish()
    assert len(keep) == 8 and peaks["many"] - peaks["few"] > 40 * MIB


def churn(watch):
    """Frees 48 MiB in pieces of 2 MiB with living ones between, then takes as much in pieces that do not fit between."""
    pieces = [torch.ones(MIB // 2) for _ in range(48)]
    keep, pieces = pieces[::2], []
    larger = [torch.ones(3 * MIB // 4) for _ in range(16)]
    watch.enter("")
    return keep, larger


def test_what_a_phase_frees_is_in_use_no_more_once_memory_is_read_exactly(keeping):
    """Before, the C library keeps it, in holes of its heap too; what it had kept by then serves no later phase."""
    watch = memory.Memory("cpu")
    for phase in ("first_step", "step"):
        watch.enter(phase)
        churn(watch)
    assert watch.peaks["step"] > 130 * MIB
    holes = [tensor for i, tensor in enumerate(mebibytes(256)) if i % 16 == 0]
    watch.read_exactly()
    watch.enter("step")
    churn(watch)
    peaks = watch.finish()
    assert peaks["step"] == pytest.approx((16 + 96) * MIB, abs=8 * MIB) and len(holes) == 16
    assert peaks["first_step"] == peaks["step"], "it does not come again, but needed no more"


def test_what_the_peak_is_at_least_is_in_use_between_phases(keeping):
    watch = memory.Memory("cpu")
    for n in (48, 4):
        watch.enter("step")
        tensors = mebibytes(n)
        assert len(tensors) == n
    watch.enter("steady")
    assert 40 * MIB < watch.least_bytes < 60 * MIB


def test_what_the_step_taken_apart_frees_stays_for_the_timed_ones(keeping):
    """Handed back to the system, it would have to be faulted in again in the first timed step, which then reads long."""
    watch = memory.Memory("cpu")
    report = SimpleNamespace(phase_times_s={})
    request = SimpleNamespace(world_size=2, script=None)
    apart = Breakdown(SimpleNamespace(report=report), request, torch.device("cpu"), watch)
    apart.take_apart()
    tensors = mebibytes(64)
    keep, tensors = tensors[::8], []
    held = memory.resident_bytes()
    for phase in ("forward", "backward", "optimizer", ""):
        apart.enter(phase)
    watch.enter("steady")
    assert held - memory.resident_bytes() < 8 * MIB and len(keep) == 8
    assert "forward" in report.phase_times_s, "its phases were timed"


def test_a_rank_far_from_its_limit_is_seldom_looked_at():
    assert memory_watch.interval_s(100 << 30) == memory_watch.MAX_INTERVAL_S
    assert memory_watch.interval_s(0) == memory_watch.MIN_INTERVAL_S
    assert 0.05 < memory_watch.interval_s(1 << 30) < 0.1


def forked(program, **variables):
    """Runs a program in a process that has torch already, since to import it takes seconds."""
    pid = os.fork()
    if pid == 0:
        try:
            os.environ.update(variables)
            exec(program, {})
        finally:
            os._exit(1)
    return pid


WATCHED = """
import os, threading, time
from autotune.worker.measure import memory
limit = 64 << 20
memory.limit_host_memory(memory.resident_bytes(), limit, lambda growth: os._exit(77 if growth > limit else 1))
assert "AUTOTUNE_MEMORY_FD" not in os.environ
kept = bytearray(os.urandom(1 << 20)) * {mib}
if {freed}:
    del kept
time.sleep({seconds})
os._exit(0)
"""


@pytest.mark.cells(1)
@pytest.mark.process
@pytest.mark.parametrize(
    ("mib", "freed", "status"), [(128, False, 77), (128, True, 0), pytest.param(8, False, 0, marks=pytest.mark.system)]
)
def test_a_supervisor_sees_the_growth_of_a_rank_that_does_nothing_for_it(mib, freed, status):
    watch = memory_watch.MemoryWatch()
    seconds = 60 if status else 0.5
    rank = forked(WATCHED.format(mib=mib, freed=freed, seconds=seconds), **watch.variables())
    while (ended := os.waitpid(rank, os.WNOHANG))[0] == 0:
        watch.look(rank)
        time.sleep(0.01)
    watch.drop()
    assert os.waitstatus_to_exitcode(ended[1]) == status


GROWS_BETWEEN_TWO_LOOKS = """
import os, time
from autotune.worker.measure import memory
limit = 64 << 20
look = memory.limit_host_memory(memory.resident_bytes(), limit, lambda growth: os._exit(77 if growth > limit else 1))
kept = bytearray(os.urandom(1 << 20)) * {mib}
look()
os._exit(0)
"""


@pytest.mark.cells(1)
@pytest.mark.process
@pytest.mark.parametrize(("mib", "status"), [(128, 77), (8, 0)])
def test_growth_since_the_last_look_is_seen_at_the_end(mib, status):
    ended = os.waitpid(forked(GROWS_BETWEEN_TWO_LOOKS.format(mib=mib)), 0)
    assert os.waitstatus_to_exitcode(ended[1]) == status


@pytest.mark.parametrize(("own_s", "cores"), [(2.0, 0.5), (9.0, 0.0)])
def test_load_by_others_is_without_our_own_and_never_negative(monkeypatch, own_s, cores):
    readings = iter(
        [(100.0, 0.0, 10.0), (103.0, 0.0, 12.0)]
    )  # busy and stolen seconds of all cores, and the wall clock
    monkeypatch.setattr(machine_load.Busyness, "_read", staticmethod(lambda: next(readings)))
    assert machine_load.Busyness().cores_used_by_others(own_s) == pytest.approx(cores)


@pytest.mark.process
def test_what_a_process_started_is_its_own_load():
    """A busy loader's workers were other processes, for which the baseline was measured again."""
    spin = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\ntime.sleep({})"
    before = machine_load.own_cpu_s()
    with subprocess.Popen([sys.executable, "-c", spin.format(60)]) as running:
        assert wait_until(lambda: machine_load.own_cpu_s() - before > 0.3)
        running.kill()
    subprocess.run([sys.executable, "-c", spin.format(0)], check=True)
    assert machine_load.own_cpu_s() - before > 0.6


def test_what_others_do_on_cores_that_a_trial_may_not_use_is_no_load(monkeypatch):
    """On a node that a scheduler shares out, each trial on CPUs was measured again."""
    busy = [0.0, 0.0, 0.0, 0.0]
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [SimpleNamespace(user=each) for each in busy])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2})
    load = machine_load.Busyness()
    busy[:] = [1.0, 9.0, 2.0, 9.0]
    assert load._read()[0] == 3.0


def test_the_machine_s_busy_time_grows():
    before = machine_load.Busyness._read()
    sum(range(2_000_000))
    now = machine_load.Busyness._read()
    assert now[0] > before[0] and now[1] >= before[1] and now[2] > before[2]


@pytest.mark.parametrize(
    ("waits", "ended_s", "share"),
    [
        ({"1": 1.5, "2": 1.0}, 0.0, (1.0 + 0.25) / 2),  # another thread since then; 1/4 s stolen from each core
        ({}, 0.0, 1.0),  # a kernel that does not tell
        ({"1": 1.5}, 3.0, 1.0),  # a loader's workers have ended, and what they waited is lost
    ],
)
def test_what_threads_waited_for_a_core_is_a_share_of_the_time(monkeypatch, waits, ended_s, share):
    readings = iter([(0.0, 0.0, 10.0), (4.0, 0.5, 12.0)])
    monkeypatch.setattr(machine_load.Busyness, "_read", staticmethod(lambda: next(readings)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    found, ended = iter([{"1": 1.0}, waits]), iter([0.0, ended_s])
    monkeypatch.setattr(machine_load, "waits_s", lambda: next(found))
    monkeypatch.setattr(machine_load, "ended_cpu_s", lambda: next(ended, ended_s))
    assert machine_load.Busyness().waited() == pytest.approx(share)


@pytest.mark.process
def test_threads_of_this_process_and_of_those_that_it_starts_are_seen_to_wait_for_cores():
    """One that sleeps waits for none, and one of two on one core waits for half of the time."""
    if not machine_load.waits_s():
        pytest.skip("this kernel does not tell how long threads wait for a core")
    spin = f"import os\nos.sched_setaffinity(0, [{min(os.sched_getaffinity(0))}])\nwhile True: pass"
    both = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]
    asleep = subprocess.Popen(["sleep", "60"])
    try:
        assert wait_until(lambda: all(machine_load.waits_s().get(str(each.pid), 0.0) > 0.4 for each in both))
        assert machine_load.waits_s()[str(asleep.pid)] < 0.2
    finally:
        for each in (*both, asleep):
            each.kill()
            each.wait()


def test_peaks_of_a_device_outlive_those_who_reset_them(monkeypatch):
    """DeepSpeed does while ZeRO 1 and 2 are made, once it has emptied the allocator's cache: runtime/utils.py, empty_cache."""
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
    from deepspeed.runtime import utils

    counter = SimpleNamespace(now=0, peak=0)

    def hold(size):
        counter.now, counter.peak = size, max(counter.peak, size)

    monkeypatch.setattr(memory.torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(memory.torch.cuda, "max_memory_allocated", lambda *_: counter.peak)
    monkeypatch.setattr(memory.torch.cuda, "max_memory_reserved", lambda *_: counter.peak + 1)
    monkeypatch.setattr(memory.torch.cuda, memory.RESET, lambda *_: vars(counter).update(peak=counter.now))
    monkeypatch.setattr(memory.torch.cuda.memory, memory.RESET, memory.torch.cuda.memory.reset_peak_memory_stats)
    for module in filter(None, (torch.accelerator, getattr(torch.accelerator, "memory", None))):
        monkeypatch.setattr(module, memory.RESET, lambda *_: vars(counter).update(peak=counter.now), raising=False)
    for place in ("deepspeed.accelerator.get_accelerator", "deepspeed.runtime.utils.get_accelerator"):
        monkeypatch.setattr(place, lambda: accelerator)
    accelerator = CUDA_Accelerator()
    watch = memory.Memory("cuda")
    hold(900)
    hold(300)
    utils.empty_cache()
    watch.enter("first_step")
    hold(400)
    hold(300)
    torch.cuda.reset_peak_memory_stats()  # as a script that prints its peaks
    hold(350)
    torch.accelerator.reset_peak_memory_stats()  # as one that does so whatever the device is
    watch.enter("steady")
    hold(360)
    hold(330)
    torch.accelerator.reset_peak_memory_stats()
    assert watch.finish() == {"initialize": 900, "first_step": 400, "steady": 360} and watch.reserved_bytes == 901
