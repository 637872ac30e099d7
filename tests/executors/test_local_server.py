"""The warm server of the local engine: its start, its turns, and its trials when it or its driver is killed."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.zoo import CLEAN, Zoo, shared_memory, wait_until

from autotune.errors import UserError
from autotune.executors import base
from autotune.executors.local import LocalExecutor
from autotune.system import processes, temporary
from autotune.trial.folder import TrialDir, write_record
from autotune.trial.result import Outcome

pytestmark = pytest.mark.process


def test_what_a_killed_server_left_in_the_temporary_folder_is_removed(tmp_path, monkeypatch) -> None:
    """It had made a folder for the trial's temporary files, which stayed for ever."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    executor = LocalExecutor([], tmp_path / "server.log")
    (left := tmp_path / f"{temporary.prefix(executor.mark)}x").mkdir()
    executor._server = server = subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    server.kill()
    executor.close()
    assert not left.exists()


def test_a_limit_on_addresses_is_named_where_the_server_does_not_start(tmp_path, monkeypatch) -> None:
    """`ulimit -v` left nothing but `what():  std::bad_alloc`."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**29, -1))
    executor = LocalExecutor([], tmp_path / "server.log")
    (tmp_path / "server.log").write_text("  what():  std::bad_alloc\n")
    monkeypatch.setattr(executor, "launch", lambda: setattr(executor, "_server", subprocess.Popen(["false"])))
    monkeypatch.setattr(executor, "_answer", lambda _: None)
    with pytest.raises(
        UserError, match=r"bad_alloc; `ulimit -v` gives .* 512 MiB of addresses.*: `ulimit -v unlimited`"
    ):
        executor.start()


def test_the_interface_that_the_user_names_is_handed_on_and_else_the_loopback(tmp_path, monkeypatch) -> None:
    """Agents of several machines have such a server, too: gloo got another interface than the user's."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    found = LocalExecutor([], tmp_path / "server.log")._environment()
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("ib0", "lo")


def test_two_executors_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path))
    first, second = LocalExecutor([], tmp_path / "a.log"), LocalExecutor([], tmp_path / "b.log")
    waited, entered = threading.Event(), threading.Event()

    def take_a_turn() -> None:
        with second.turn(waited.set):
            entered.set()

    thread = threading.Thread(target=take_a_turn, daemon=True)
    with first.turn(lambda: None):
        thread.start()
        assert waited.wait(60)
        assert not entered.is_set()
    assert entered.wait(60)
    thread.join()


def test_a_turn_is_waited_for_no_longer_than_there_is_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with --time-budget waited before its baseline until another study's trial ended, which may take minutes."""
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path))
    first, second = LocalExecutor([], tmp_path / "a.log"), LocalExecutor([], tmp_path / "b.log")

    def time_passes() -> None:
        second.ends_at_s = 0.0

    with first.turn(lambda: None), pytest.raises(base.TimeOver), second.turn(time_passes):
        pytest.fail("it had the turn of another one")


def test_a_cache_folder_that_takes_no_lock_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told as an error of autotune itself."""

    def refused(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr("fcntl.flock", refused)
    with (
        pytest.raises(UserError, match=r"lock cannot be locked \(Function not .*\): set AUTOTUNE_CACHE"),
        LocalExecutor([], tmp_path / "a.log").turn(pytest.fail),
    ):
        pytest.fail("it has no turn")


@pytest.mark.parametrize("launched", [False, True])
def test_an_engine_that_cannot_start_says_why(
    launched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Also one that died before it was waited for; it is not started a second time."""
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such interpreter >&2\necho >> starts\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    monkeypatch.chdir(tmp_path)
    executor = LocalExecutor([], tmp_path / "server.log")
    if launched:
        executor.launch()
        assert executor._server is not None and executor._server.wait(60) == 3
    with pytest.raises(UserError, match=r"exit status 3\); see .*server.log: no such interpreter"):
        executor.start()
    executor.close()
    assert (tmp_path / "starts").read_text() == "\n"


def test_a_sweep_ends_what_bears_the_mark_and_nothing_else() -> None:
    command = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    marked = subprocess.Popen(command, env={**os.environ, processes.MARK: "one"}, start_new_session=True)
    other = subprocess.Popen(command, env={**os.environ, processes.MARK: "another"})
    try:
        assert wait_until(lambda: marked.pid in processes.sweep("one"))
        assert marked.wait(60) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (marked, other):
            process.kill()
            process.wait()


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Zoo]:
    """An executor to be killed. A module that its server imports keeps a helper process, as some libraries do."""
    (tmp_path / "keeps_a_helper.py").write_text(
        "import subprocess, sys\nhelper = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    executor = LocalExecutor(["torch", "keeps_a_helper"], tmp_path / "server.log")
    before = shared_memory()
    yield Zoo(executor, tmp_path / "trials")
    mark = executor.mark
    executor.close()
    assert marked(mark) == []
    assert not shared_memory() - before


def marked(mark: str) -> list[int]:
    """Processes that an executor or its trials started."""
    found = []
    for pid in psutil.pids():
        try:
            if f"{processes.MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
        except OSError:
            continue
    return found


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.system
@pytest.mark.smoke
def test_a_killed_server_loses_its_trial_and_the_next_one_starts_a_new_server(own: Zoo) -> None:
    """Killed twice in one trial, then between two."""
    assert own.run("ok", **CLEAN).outcome is Outcome.COMPLETE
    # The module's process is not the trial's to end; the server's own short ones end by themselves.
    children: list[psutil.Process] = []

    def only_one() -> bool:
        children[:] = own.server.children(recursive=True)
        return len(children) == 1

    assert wait_until(only_one)
    (helper,) = children
    mark = own.executor.mark

    killed = []

    def kill_server() -> None:
        if own.entered("measure"):
            killed.append(own.server.pid)
            own.server.kill()

    result = own.run("children", kill_server, budget_s=60.0, min_samples=10**9)
    assert (result.outcome, result.reason) == (Outcome.CRASHED, "twice: the process that watched the ranks died")
    assert len(set(killed)) == 2
    assert wait_until(lambda: not marked(mark) and not is_alive(helper))
    assert own.run("ok", **CLEAN).outcome is Outcome.COMPLETE
    assert own.executor.mark != mark
    server = own.server
    server.kill()
    assert wait_until(lambda: not is_alive(server))
    assert own.run("ok", **CLEAN).outcome is Outcome.COMPLETE


DRIVER = """
import sys
from pathlib import Path
from autotune.executors import base
from autotune.executors.local import LocalExecutor
from autotune.trial.folder import read_record
from autotune.trial.request import TrialRequest

root = Path(sys.argv[1])
executor = LocalExecutor(["torch"], root / "server.log")
executor.start()
print(executor.mark, flush=True)
base.run(executor, root / "trial", read_record(root / "request.json", TrialRequest))
"""


def test_nothing_outlives_a_driver_that_is_killed(tmp_path: Path) -> None:
    own = Zoo(LocalExecutor([], tmp_path / "unused.log"), tmp_path)
    own.folder = TrialDir(tmp_path / "trial")
    write_record(tmp_path / "request.json", own.request("children", budget_s=60.0, min_samples=10**9))
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    with driver.stdout:
        mark = driver.stdout.readline().strip()
        try:
            assert wait_until(lambda: own.entered("measure"), 120)
            assert len(marked(mark)) == 5  # the server, two ranks, and a child of each
            (own.folder.scratch / "checkpoint").mkdir(parents=True)
        finally:
            driver.kill()
            driver.wait()
    assert wait_until(lambda: not marked(mark)) and not own.folder.scratch.exists()
