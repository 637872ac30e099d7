"""The three lanes of the tests: `unit` (no process), `process` (trials and commands), `system` (services, minutes).

A test is in the lane that it is marked with, else in that of its module; a test without a mark is a unit test. What takes many
seconds, and tries what a faster test beside it tries too, is in `system`. A unit test that starts a process fails. What a worker
of pytest-xdist shares with the others is kept apart here.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LANES = ("unit", "process", "system")
STARTS = {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}

_unit_test: str | None = None  # the one that now runs in this process


class ProcessStarted(BaseException):
    """Ends a unit test; no `except Exception` of the product hides it."""


def _refuse_processes(event: str, _: object) -> None:
    if event in STARTS and _unit_test is not None:
        raise ProcessStarted(f"{_unit_test} started a process: mark it or its module with pytest.mark.process")


sys.addaudithook(_refuse_processes)


def lane_of(item: pytest.Item) -> str:
    """The lane of a test."""
    return next((mark.name for mark in item.iter_markers() if mark.name in LANES), "unit")  # its own mark comes first


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks each test with its lane; files with most tests of processes come first, so that workers end together.

    Of a table marked `cells(n)` the first n cells that are collected stay in their lane, and the others are in `system`.
    """
    n_slow, n_cells = Counter[Path](), Counter[Any]()
    for item in items:
        lane, cells = lane_of(item), item.get_closest_marker("cells")
        if cells:
            test = item.getparent(pytest.Class), item.path, item.originalname
            n_cells[test] += lane != "system"
            lane = "system" if n_cells[test] > cells.args[0] else lane
        item.add_marker(lane)
        n_slow[item.path] += lane == "process"
    items.sort(key=lambda item: -n_slow[item.path])


def pytest_collection_finish() -> None:
    """Leaves what was collected and imported out of each further collection of garbage, which would go through all of it."""
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Refuses processes to a unit test, and gives one marked `alone` the machine without trials of other workers."""
    global _unit_test  # noqa: PLW0603 - the audit hook has no other way to know
    unit = item.get_closest_marker("unit") is not None
    with contextlib.ExitStack() as stack:
        if item.get_closest_marker("alone"):
            stack.enter_context(_turn(fcntl.LOCK_EX))
        elif not unit:
            stack.enter_context(_turn(fcntl.LOCK_SH))
        _unit_test = item.nodeid if unit else None
        try:
            return (yield)
        finally:
            _unit_test = None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """Allows processes again: a fixture of the module, of tests in another lane, may end now."""
    global _unit_test  # noqa: PLW0603
    _unit_test = None


@contextlib.contextmanager
def _turn(how: int) -> Iterator[None]:
    """Holds the lock that the workers of a session share; who waits for it goes before those that come later."""
    folder = os.environ.get("AUTOTUNE_TESTS_FOLDER")
    if folder is None:
        yield
        return
    with open(Path(folder) / "queue", "w") as queue, open(Path(folder) / "turn", "w") as turn:
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(turn, how)
        fcntl.flock(queue, fcntl.LOCK_UN)
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Gives each worker a folder for temporary files, and so a machine lock: trials of two workers do not wait for each other."""
    if hasattr(config, "workerinput") or "AUTOTUNE_TESTS_FOLDER" not in os.environ:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # where `tmp_path` stays to be looked at
        own = tempfile.mkdtemp(prefix="autotune-tests-", dir="/tmp" if os.access("/tmp", os.W_OK) else None)
        os.chmod(own, 0o755)  # the PostgreSQL server of a test runs as another user
        config.add_cleanup(lambda: shutil.rmtree(own, ignore_errors=True))
        if not hasattr(config, "workerinput"):
            os.environ["AUTOTUNE_TESTS_FOLDER"] = own  # its workers inherit it
            config.add_cleanup(lambda: os.environ.pop("AUTOTUNE_TESTS_FOLDER", None))
        os.environ["TMPDIR"] = own
        tempfile.tempdir = None
