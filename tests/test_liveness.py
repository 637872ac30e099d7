"""Whether a process lives: neither a number that is used again nor a clock that is set deceives it."""

import os
import subprocess
import sys

from zoo import wait_until

from autotune import liveness


def test_a_process_lives_until_it_ends_though_nobody_has_waited_for_it():
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    mark = f"{child.pid}:{liveness.started(child.pid)}"
    assert liveness.lives(mark) and liveness.lives(liveness.mark())
    child.kill()
    assert wait_until(lambda: not liveness.lives(mark))
    child.communicate()
    assert liveness.started(child.pid) is None


def test_a_number_that_is_used_again_is_another_process():
    assert not liveness.lives(f"{os.getpid()}:1")
    assert not any(liveness.lives(nonsense) for nonsense in ("", ":", f"{os.getpid()}:", "x:1"))


def test_a_clock_that_is_set_changes_nothing(monkeypatch):
    """The moment of the boot moves with the clock, and with it whatever is counted from there."""
    before = liveness.mark()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 0.0)
    assert liveness.mark() == before and liveness.lives(before)
