"""Processes: whether one lives, which ones belong to a trial, and how many it may have."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.zoo import wait_until

from autotune.system import processes
from autotune.system.owner import Owner
from autotune.system.processes import descendants

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


@pytest.mark.process
def test_children_of_children_are_found_in_whatever_session(family: tuple[int, int]) -> None:
    assert set(family) <= set(descendants(os.getpid()))
    assert descendants(family[0]) == [family[1]]


@pytest.mark.process
def test_the_dead_that_wait_to_be_reaped_are_told_apart() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    assert wait_until(lambda: child.pid not in descendants(os.getpid()))
    assert child.pid in descendants(os.getpid(), dead=True)
    child.wait()
    assert child.pid not in descendants(os.getpid(), dead=True)


def test_the_machine_counts_its_tasks() -> None:
    assert processes.n_tasks() >= len(descendants(os.getpid())) + 1


def test_more_may_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes.most(8) > processes.most(1) > 256
    monkeypatch.setenv(processes.VARIABLE, "12")
    assert processes.most(8) == 12


@pytest.mark.process
def test_a_process_lives_until_it_ends_though_nobody_has_waited_for_it() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    owner = replace(Owner.here(), pid=child.pid, started=str(processes.started(child.pid)))
    assert owner.lives() and Owner.here().lives()
    child.kill()
    assert wait_until(lambda: owner.lives() is False)
    child.communicate()
    assert processes.started(child.pid) is None
