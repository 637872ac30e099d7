"""The processes of a trial: found below the agent whatever they do to hide, and counted when there may be too many."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from zoo import wait_until

from autotune.worker import processes
from autotune.worker.processes import Watch, descendants

# A child that forks a grandchild in a session of its own, says its number, and waits.
FAMILY = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), flush=True)
    time.sleep(60)
os.wait()
"""


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """A child and a grandchild of this process."""
    child = subprocess.Popen([sys.executable, "-S", "-c", FAMILY], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    yield child.pid, grandchild
    os.kill(grandchild, 9)
    child.kill()
    child.communicate()


def test_children_of_children_are_found_in_whatever_session(family: tuple[int, int]) -> None:
    assert set(family) <= set(descendants(os.getpid()))
    assert descendants(family[0]) == [family[1]]


def test_the_dead_that_wait_to_be_reaped_are_told_apart() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    assert wait_until(lambda: child.pid not in descendants(os.getpid()))
    assert child.pid in descendants(os.getpid(), dead=True)
    child.wait()
    assert child.pid not in descendants(os.getpid(), dead=True)


def test_they_are_counted_only_when_there_may_be_too_many(
    family: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks, counted = 100, [0]
    monkeypatch.setattr(processes, "n_tasks", lambda: tasks)
    monkeypatch.setattr(processes, "descendants", lambda _: counted.append(1) or descendants(os.getpid()))
    others = len(descendants(os.getpid())) - 2
    watch = Watch(limit=3, others=others)
    assert not watch.too_many() and counted == [0]
    tasks = 104  # threads of somebody else, as it turns out
    assert not watch.too_many() and counted == [0, 1]
    tasks = 105  # one more at most
    assert not watch.too_many() and counted == [0, 1]
    tasks = 106
    assert not watch.too_many() and counted == [0, 1, 1]
    watch.limit = 1
    tasks = 110
    assert watch.too_many()


def test_the_machine_counts_its_tasks() -> None:
    assert processes.n_tasks() >= len(descendants(os.getpid())) + 1


def test_more_may_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes.most(8) > processes.most(1) > 256
    monkeypatch.setenv(processes.VARIABLE, "12")
    assert processes.most(8) == 12
