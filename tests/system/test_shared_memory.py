"""Whose a file in /dev/shm is, and which ones nobody will ever remove."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.zoo import wait_until

from autotune.system import shared_memory

pytestmark = pytest.mark.alone  # a trial of another worker may remove what it takes for abandoned


@pytest.fixture
def shared() -> Iterator[str]:
    """A mark in the names of files in /dev/shm, which are removed afterwards."""
    mark = f"autotune-test-{uuid.uuid4().hex[:8]}"
    yield mark
    for path in Path("/dev/shm").glob(f"*{mark}*"):
        path.unlink()


def make(name: str) -> Path:
    path = Path("/dev/shm", name)
    path.write_bytes(bytes(4096))
    return path


def test_what_is_named_for_a_process_of_the_trial_is_the_trials(shared: str) -> None:
    before = frozenset(shared_memory.there())
    for name in (f"{shared}_4711_0", f"{shared}_14711_0", f"{shared}_47110", f"{shared}-4711.x"):
        make(name)
    assert {path.name for path in shared_memory.left({4711}, before)} == {f"{shared}_4711_0", f"{shared}-4711.x"}


def test_what_was_there_before_is_not(shared: str) -> None:
    make(f"{shared}_4711")
    make(f"psm_{shared}")
    before = frozenset(shared_memory.there())
    assert shared_memory.left({4711}, before) == [] == shared_memory.abandoned(before)


def test_what_bears_no_number_is_the_trials_only_if_nobody_alive_maps_it(shared: str) -> None:
    before = frozenset(shared_memory.there())
    used, left = make(f"psm_{shared}_used"), make(f"psm_{shared}_left")
    with open(used, "r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert shared_memory.left(set(), before) == [left] == shared_memory.abandoned(before)


@pytest.mark.process
def test_a_process_that_only_waits_to_be_reaped_is_dead(shared: str) -> None:
    before = frozenset(shared_memory.there())
    child = subprocess.Popen([sys.executable, "-S", "-c", "input(1)"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.read(1) == b"1"
    left = make(f"torch_{child.pid}_{shared}")
    assert shared_memory.abandoned(before) == []
    child.kill()
    assert wait_until(lambda: shared_memory.abandoned(before) == [left])
    child.communicate()


def test_what_a_dead_process_left_is_abandoned_unless_it_is_used_or_older(shared: str) -> None:
    before = frozenset(shared_memory.there())
    dead, used = make(f"torch_999999999_{shared}_0"), make(f"torch_999999999_{shared}_1")
    make(f"torch_{os.getpid()}_{shared}")
    make(f"{shared}_999999999")  # called as no library calls its own
    with open(used, "r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert shared_memory.abandoned(before) == [dead]
        assert shared_memory.abandoned(before, since=time.time() + 60) == []


def test_a_mapped_file_whose_name_is_no_utf_8_hides_nothing(shared: str, tmp_path: Path) -> None:
    """Any process of the machine may have one, and the clearing away after a trial ended in a UnicodeDecodeError."""
    before = frozenset(shared_memory.there())
    left, other = make(f"psm_{shared}"), os.fsencode(tmp_path) + b"/caf\xe9"
    with open(other, "wb+") as file:
        file.write(bytes(4096))
        file.flush()
        with mmap.mmap(file.fileno(), 4096):
            assert shared_memory.abandoned(before) == [left]
