"""Memory in use in each phase, its limit, and the load of the machine by others."""

import os
import subprocess
import sys
import time

import pytest
import torch

from autotune.worker.agent import memory_watch
from autotune.worker.measure import machine_load, memory

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


def test_memory_that_was_freed_before_counts_when_it_is_used_again():
    """The C library keeps freed chunks below a living one; counted as resident at the start, they hide the growth."""
    memory.keep_freed_memory(True)
    tensors = mebibytes(64)
    keep, tensors = tensors[-1], []
    watch = memory.Memory("cpu")
    watch.enter("again")
    again = mebibytes(64)
    assert watch.finish()["again"] > 48 * MIB and keep is not None and len(again) == 64


@pytest.mark.parametrize("holes", [False, True])
def test_freed_tensors_are_not_in_use(holes):
    """Freed chunks that the C library would keep are no memory of the next phase, even in holes of earlier tensors."""
    earlier = []
    if holes:
        memory.keep_freed_memory(True)
        earlier = [tensor for i, tensor in enumerate(mebibytes(256)) if i % 4 == 0]
    watch = memory.Memory("cpu")
    watch.enter("many")
    tensors = mebibytes(64)
    keep, tensors = tensors[::8], []
    watch.enter("few")
    torch.ones(MIB // 4).sum()
    peaks = watch.finish()
    assert len(keep) == 8 and (not holes or earlier)
    assert peaks["many"] - peaks["few"] > 40 * MIB


def test_a_rank_far_from_its_limit_is_seldom_looked_at():
    assert memory_watch.interval_s(100 << 30) == memory_watch.MAX_INTERVAL_S
    assert memory_watch.interval_s(0) == memory_watch.MIN_INTERVAL_S
    assert 0.05 < memory_watch.interval_s(1 << 30) < 0.1


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


@pytest.mark.process
@pytest.mark.parametrize(("mib", "freed", "status"), [(128, False, 77), (128, True, 0), (8, False, 0)])
def test_a_supervisor_sees_the_growth_of_a_rank_that_does_nothing_for_it(mib, freed, status):
    watch = memory_watch.MemoryWatch()
    seconds = 60 if status else 0.5
    program = WATCHED.format(mib=mib, freed=freed, seconds=seconds)
    environment = {**os.environ, **watch.variables()}
    rank = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, pass_fds=[int(environment["AUTOTUNE_MEMORY_FD"])]
    )
    watch.release()
    while rank.poll() is None:
        watch.look(rank.pid)
        time.sleep(0.01)
    watch.drop()
    assert rank.returncode == status


GROWS_BETWEEN_TWO_LOOKS = """
import os, time
from autotune.worker.measure import memory
limit = 64 << 20
look = memory.limit_host_memory(memory.resident_bytes(), limit, lambda growth: os._exit(77 if growth > limit else 1))
kept = bytearray(os.urandom(1 << 20)) * {mib}
look()
os._exit(0)
"""


@pytest.mark.process
@pytest.mark.parametrize(("mib", "status"), [(128, 77), (8, 0)])
def test_growth_since_the_last_look_is_seen_at_the_end(mib, status):
    done = subprocess.run([sys.executable, "-c", GROWS_BETWEEN_TWO_LOOKS.format(mib=mib)], check=False)
    assert done.returncode == status


@pytest.mark.parametrize(("own_s", "cores"), [(2.0, 0.5), (9.0, 0.0)])
def test_load_by_others_is_without_our_own_and_never_negative(monkeypatch, own_s, cores):
    readings = iter([(100.0, 10.0), (103.0, 12.0)])  # busy seconds of all cores, and the wall clock
    monkeypatch.setattr(machine_load.Busyness, "_read", staticmethod(lambda: next(readings)))
    assert machine_load.Busyness().cores_used_by_others(own_s) == pytest.approx(cores)


def test_the_machine_s_busy_time_grows():
    before = machine_load.Busyness._read()
    sum(range(2_000_000))
    assert all(now > then for now, then in zip(machine_load.Busyness._read(), before, strict=True))
