"""Whatever becomes of a trial: it is named for what it is, nothing of it is left, and the next trial is clean."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.zoo import CLEAN, ENDS, MIB, End, Zoo, assert_nothing_left, build_locks, shared_memory, wait_until

from autotune.errors import UserError
from autotune.executors import base
from autotune.executors.base import Status
from autotune.executors.local import LocalExecutor
from autotune.system import processes
from autotune.system.machine import extensions_dir
from autotune.trial.folder import TrialDir, read_record, result_in, write_record
from autotune.trial.result import Exit, Outcome

pytestmark = pytest.mark.process


@pytest.fixture(scope="session")
def reference(executor: LocalExecutor, tmp_path_factory: pytest.TempPathFactory) -> list[float | None]:
    """Losses of a well-behaved trial on the session's server."""
    return Zoo(executor, tmp_path_factory.mktemp("reference")).run("ok", **CLEAN).losses


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.model)
def test_a_bad_trial_is_named_for_what_it_is_and_the_next_one_is_clean(
    zoo: Zoo, reference: list[float | None], end: End
) -> None:
    result = zoo.run(end.model, **(end.what or {}))
    assert (result.outcome, result.phase) == (end.outcome, end.phase), result
    assert re.search(end.reason, result.reason), result.reason
    assert "\n" not in result.reason
    assert end.rank is None or result.failed_rank == end.rank
    assert_nothing_left(zoo, shared_memory())
    assert zoo.run("ok", **CLEAN).losses == reference


def test_a_smaller_micro_batch_fits_the_memory_that_a_large_one_outgrows(zoo: Zoo) -> None:
    assert zoo.run("oom", micro=1, device_memory_bytes=300 * MIB).outcome is Outcome.COMPLETE


def test_the_result_lies_in_the_folder_and_reads_back(zoo: Zoo) -> None:
    result = zoo.run("ok", **CLEAN)
    assert result_in(zoo.folder.path) == result
    assert read_record(zoo.folder.exit, Exit).codes == {0: 0, 1: 0}
    assert json.loads(zoo.folder.ds_config.read_text())["train_micro_batch_size_per_gpu"] == 4


def test_a_trial_in_a_used_folder_starts_from_nothing(zoo: Zoo) -> None:
    zoo.run("crash_rank1")
    result = base.run(zoo.executor, zoo.folder.path, zoo.request("ok", **CLEAN))
    assert result.outcome is Outcome.COMPLETE and "dislikes" not in zoo.log(1)


def test_a_rank_that_leaves_alone_with_status_0_is_named_not_its_peer(
    zoo: Zoo, write_model: Callable[[str], Path]
) -> None:
    leaving = "if self.calls == 3 and os.environ['RANK'] == '1': os._exit(0)"
    result = zoo.run(write_model(in_forward(leaving)))
    assert (result.outcome, result.failed_rank) == (Outcome.CRASHED, 1)
    assert result.reason == "rank 1 exited with status 0 but wrote no result"


def test_a_cause_that_sounds_like_an_echo_is_still_the_cause(zoo: Zoo, write_model: Callable[[str], Path]) -> None:
    """Rank 0 hangs, so that the agent kills it: no failure of rank 0 may be read into that."""
    failing = """
        if self.calls == 3 and os.environ['RANK'] == '1': raise OSError('connection refused by the data server')
        if self.calls == 3: time.sleep(60)"""
    result = zoo.run(write_model(in_forward(failing)))
    assert (result.outcome, result.failed_rank) == (Outcome.CRASHED, 1)
    assert result.reason == "OSError: connection refused by the data server"


def test_a_rank_killed_from_outside_is_named(zoo: Zoo, reference: list[float | None]) -> None:
    def kill_rank_1() -> None:
        if zoo.entered("measure") and len(zoo.ranks()) == 2:
            zoo.ranks()[1].kill()

    result = zoo.run("noisy", kill_rank_1, budget_s=30.0, min_samples=10**9)
    assert (result.outcome, result.failed_rank, result.phase) == (Outcome.CRASHED, 1, "measure")
    assert result.reason == "rank 1 was killed by signal 9"
    assert zoo.run("ok", **CLEAN).losses == reference


def test_a_log_of_megabytes_is_cut_in_the_middle(zoo: Zoo) -> None:
    assert zoo.run("chatty").outcome is Outcome.COMPLETE
    for rank in (0, 1):
        log = zoo.folder.log(rank).read_bytes()
        assert len(log) < 4 * MIB
        # The rank may write in the very moment of the cut.
        assert log.index(b"\n[autotune: the log grew too large; lines were cut here]\n") >= MIB
        assert len(log) > 2 * MIB  # head and tail


def test_no_child_of_a_rank_outlives_the_trial(zoo: Zoo) -> None:
    assert zoo.run("children").outcome is Outcome.COMPLETE
    swept = [int(line.split()[1]) for line in read_record(zoo.folder.exit, Exit).swept if line.startswith("process ")]
    assert len(swept) == 2
    assert not any(psutil.pid_exists(pid) for pid in swept)
    assert not [
        p
        for p in psutil.process_iter(["cmdline"])
        if "a child of tests/models/children.py" in (p.info["cmdline"] or [])
    ]


def test_a_daemon_that_hides_from_its_rank_outlives_no_trial(zoo: Zoo) -> None:
    assert zoo.run("daemon").outcome is Outcome.COMPLETE
    assert len([line for line in read_record(zoo.folder.exit, Exit).swept if line.startswith("process ")]) == 2
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if "a daemon of tests/models/daemon.py" in (p.info["cmdline"] or [])
    ]


def test_a_fork_bomb_is_ended_with_its_reason_and_the_next_trial_is_clean(
    zoo: Zoo, reference: list[float | None]
) -> None:
    result = zoo.run("bomb")
    assert (result.outcome, result.phase) == (Outcome.CRASHED, "measure")
    assert result.reason == "it started more than 24 processes (AUTOTUNE_MOST_PROCESSES allows more)"
    assert_nothing_left(zoo, shared_memory())
    assert zoo.run("ok", **CLEAN).losses == reference


def test_a_rank_that_closes_its_output_and_removes_its_folder_still_reports(
    zoo: Zoo, write_model: Callable[[str], Path]
) -> None:
    folder = zoo.root / "0001"
    closing = f"""
        if self.calls == 3:
            import shutil
            for descriptor in (0, 1, 2): os.close(descriptor)
            shutil.rmtree({str(folder)!r}, ignore_errors=True)"""
    result = zoo.run(write_model(in_forward(closing)))
    assert zoo.folder.path == folder
    assert result.outcome is Outcome.COMPLETE, result.reason
    assert result_in(folder) == result


def test_a_rank_that_writes_nonsense_in_place_of_its_report_has_none(
    zoo: Zoo, write_model: Callable[[str], Path]
) -> None:
    report = zoo.root / "0001" / "rank-1.json"
    writing = f"""
        if self.calls == 3 and os.environ["RANK"] == "1":
            open({str(report)!r}, "wb").write(os.urandom(4096))
            os._exit(0)"""
    result = zoo.run(write_model(in_forward(writing)))
    assert (result.outcome, result.failed_rank) == (Outcome.CRASHED, 1)
    assert result.reason == "rank 1 exited with status 0 but wrote no result"


@pytest.mark.alone  # a trial of another worker would remove the files that bear the numbers of its own processes
def test_shared_memory_of_a_trial_is_removed_and_that_of_strangers_is_not(zoo: Zoo) -> None:
    """The strangers' files bear the very numbers that the trial's processes are going to have."""
    mark = f"stranger-{uuid.uuid4().hex[:8]}"
    newest = int(Path("/proc/loadavg").read_text().split()[-1])
    theirs = {f"{mark}_{newest + ahead}" for ahead in range(1, 600)}
    try:
        for name in theirs:
            Path("/dev/shm", name).touch()
        assert zoo.run("shm").outcome is Outcome.COMPLETE
        swept = [line for line in read_record(zoo.folder.exit, Exit).swept if line.startswith("/dev/shm/torch_")]
        assert len(swept) == 2
        assert theirs <= shared_memory()
    finally:
        for name in theirs:
            Path("/dev/shm", name).unlink(missing_ok=True)


@pytest.mark.alone
def test_shared_memory_without_a_process_number_is_removed_too(zoo: Zoo, write_model: Callable[[str], Path]) -> None:
    """Python's own SharedMemory draws names at random, and the tracker that would remove them is killed with the trial."""
    text = "from multiprocessing.shared_memory import SharedMemory\nkept = []\n"
    before = shared_memory()
    dying = (
        "if self.calls == 3: kept.append(SharedMemory(create=True, size=4096)); os.kill(os.getpid(), signal.SIGKILL)"
    )
    result = zoo.run(write_model(text + in_forward(dying)))
    assert result.outcome is Outcome.CRASHED
    assert not shared_memory() - before


def test_a_stranger_is_not_killed_with_a_trial(zoo: Zoo) -> None:
    stranger = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    try:
        assert zoo.run("crash_rank1").outcome is Outcome.CRASHED
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_build_lock_of_a_killed_rank_is_removed(zoo: Zoo, write_model: Callable[[str], Path]) -> None:
    locking = """
        if self.calls == 3:
            lock = os.path.join(os.environ["TORCH_EXTENSIONS_DIR"], "an_op", "lock")
            os.makedirs(os.path.dirname(lock), exist_ok=True)
            os.open(lock, os.O_CREAT)
            os.kill(os.getpid(), signal.SIGKILL)"""
    result = zoo.run(write_model(in_forward(locking)))
    assert result.outcome is Outcome.CRASHED
    assert str(extensions_dir() / "an_op" / "lock") in read_record(zoo.folder.exit, Exit).swept
    assert build_locks() == []
    (extensions_dir() / "an_op").rmdir()


def test_trials_leak_no_descriptor_of_the_server(zoo: Zoo) -> None:
    zoo.run("ok", **CLEAN)
    before = zoo.server.num_fds()
    for model in ("ok", "raises", "segv"):
        zoo.run(model, **CLEAN)
    assert zoo.server.num_fds() == before


def test_a_cancelled_trial_is_lost_and_the_server_stays(zoo: Zoo, reference: list[float | None]) -> None:
    zoo.run("ok", **CLEAN)
    server, request = zoo.server, zoo.request("hang")
    folder = zoo.next_folder()
    write_record(folder.request, request)
    job = zoo.executor.submit(folder)
    job.cancel()  # right behind the submit: the server may not have read either yet
    job.cancel()
    assert job.poll() is Status.EXITED
    assert base.conclude(folder, request).outcome is Outcome.LOST
    assert zoo.server == server
    assert zoo.run("ok", **CLEAN).losses == reference


def test_a_trial_whose_folder_is_gone_before_anybody_looked_has_ended(zoo: Zoo, reference: list[float | None]) -> None:
    """As an agent's may be, where the coordinator saw the file first and tries the trial again."""
    folder, request = zoo.next_folder(), zoo.request("ok", **CLEAN)
    write_record(folder.request, request)
    job = zoo.executor.submit(folder)
    until = time.monotonic() + 60
    while not folder.exit.exists() and time.monotonic() < until:
        time.sleep(0.001)
    shutil.rmtree(folder.path)
    wait_until(lambda: job.poll() is Status.EXITED, 5)
    assert job.poll() is Status.EXITED
    assert zoo.run("ok", **CLEAN).losses == reference


def test_an_interrupt_stops_the_ranks(zoo: Zoo) -> None:
    def interrupt() -> None:
        if zoo.entered("measure"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        zoo.run("hang", interrupt)
    assert zoo.server.children(recursive=True) == []


def test_a_late_cancel_does_not_reach_the_next_trial(zoo: Zoo, reference: list[float | None]) -> None:
    zoo.run("ok", **CLEAN)
    assert zoo.executor._server is not None and zoo.executor._server.stdin is not None
    zoo.executor._server.stdin.write(b'{"cancel": true}\n')
    assert zoo.run("ok", **CLEAN).losses == reference


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
        assert waited.wait(10)
        assert not entered.is_set()
    assert entered.wait(10)
    thread.join()


def test_an_engine_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such interpreter >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    executor = LocalExecutor([], tmp_path / "server.log")
    with pytest.raises(UserError, match=r"exit status 3\); see .*server.log: no such interpreter"):
        executor.start()
    executor.close()


def test_a_sweep_ends_what_bears_the_mark_and_nothing_else() -> None:
    command = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    marked = subprocess.Popen(command, env={**os.environ, processes.MARK: "one"}, start_new_session=True)
    other = subprocess.Popen(command, env={**os.environ, processes.MARK: "another"})
    try:
        assert wait_until(lambda: marked.pid in processes.sweep("one"))
        assert marked.wait(5) == -signal.SIGKILL
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


def test_a_killed_server_loses_its_trial_and_the_next_one_starts_a_new_server(own: Zoo) -> None:
    assert own.run("ok", **CLEAN).outcome is Outcome.COMPLETE
    (helper,) = own.server.children(recursive=True)  # the module's process is not the trial's to end
    mark = own.executor.mark

    def kill_server() -> None:
        if own.entered("measure"):
            own.server.kill()

    result = own.run("children", kill_server, budget_s=60.0, min_samples=10**9)
    assert (result.outcome, result.reason) == (Outcome.LOST, "the process that watched the ranks died")
    assert wait_until(lambda: not marked(mark) and not is_alive(helper))
    assert own.run("ok", **CLEAN).outcome is Outcome.COMPLETE
    assert own.executor.mark != mark


def test_a_server_killed_between_trials_is_replaced(own: Zoo) -> None:
    own.run("ok", **CLEAN)
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
            assert wait_until(lambda: own.entered("measure"), 60)
            assert len(marked(mark)) == 5  # the server, two ranks, and a child of each
        finally:
            driver.kill()
            driver.wait()
    assert wait_until(lambda: not marked(mark), 10)


def in_forward(code: str) -> str:
    """A model that does something in its forward."""
    return f"""
import os, signal, time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 1), 0

    def forward(self, x):
        self.calls += 1
        {code.strip()}
        return self.linear(x)

def model():
    return Net()

def batch(n):
    return torch.randn(n, 8), torch.randn(n, 1)
"""
