"""Whether a process lives: neither a number that is used again nor a clock that is set deceives it."""

import os
import subprocess
import sys

import pytest
from support.zoo import wait_until

from autotune.system import processes


@pytest.mark.process
def test_a_process_lives_until_it_ends_though_nobody_has_waited_for_it():
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    mark = f"{child.pid}:{processes.started(child.pid)}"
    assert processes.is_alive(mark) and processes.is_alive(processes.identity())
    child.kill()
    assert wait_until(lambda: not processes.is_alive(mark))
    child.communicate()
    assert processes.started(child.pid) is None


def test_a_number_that_is_used_again_is_another_process():
    assert not processes.is_alive(f"{os.getpid()}:1")
    assert not any(processes.is_alive(nonsense) for nonsense in ("", ":", f"{os.getpid()}:", "x:1"))


def test_a_clock_that_is_set_changes_nothing(monkeypatch):
    """The moment of the boot moves with the clock, and with it whatever is counted from there."""
    before = processes.identity()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 0.0)
    assert processes.identity() == before and processes.is_alive(before)
