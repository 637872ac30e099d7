"""Whatever becomes of a trial: it is named for what it is, nothing of it is left, and the next trial is clean."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.zoo import CLEAN, ENDS, MIB, End, Zoo, assert_nothing_left, build_locks, shared_memory, wait_until

from autotune.executors import base
from autotune.executors.base import Status
from autotune.executors.local import LocalExecutor
from autotune.system.toolkit import extensions_dir
from autotune.trial.folder import read_record, result_in, write_record
from autotune.trial.result import Exit, Outcome

pytestmark = pytest.mark.process


@pytest.fixture(scope="session")
def reference(executor: LocalExecutor, tmp_path_factory: pytest.TempPathFactory) -> list[float | None]:
    """Losses of a well-behaved trial on the session's server."""
    return Zoo(executor, tmp_path_factory.mktemp("reference")).run("ok", **CLEAN).losses


@pytest.mark.cells(9)
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


LEFT = "rank 1 exited with status 0 but wrote no result"
RANK_1 = "if self.calls == 3 and os.environ['RANK'] == '1': "


@pytest.mark.cells(2)
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (RANK_1 + "os._exit(0)", LEFT),
        # Nonsense in place of the report.
        (RANK_1 + "open('{report}', 'wb').write(os.urandom(4096)); os._exit(0)", LEFT),
        # It sounds like the echo of another failure, and rank 0 hangs until the agent kills it: that is no failure.
        (
            RANK_1
            + "raise OSError('connection refused by the data server')\n        if self.calls == 3: time.sleep(60)",
            "OSError: connection refused by the data server",
        ),
    ],
)
def test_the_rank_that_fails_is_named_and_not_its_peer(
    zoo: Zoo, write_model: Callable[[str], Path], code: str, reason: str
) -> None:
    report = zoo.root / "0001" / "rank-1.json"
    result = zoo.run(write_model(in_forward(code.replace("{report}", str(report)))))
    assert (result.outcome, result.failed_rank, result.reason) == (Outcome.CRASHED, 1, reason)


def test_a_rank_killed_from_outside_is_named(zoo: Zoo, reference: list[float | None]) -> None:
    killed: list[psutil.Process] = []

    def kill_rank_1() -> None:
        ranks = zoo.ranks()
        if zoo.entered("measure") and len(ranks) == 2 and not killed:
            killed.append(ranks[1])
            ranks[1].kill()

    result = zoo.run("noisy", kill_rank_1, budget_s=30.0, min_samples=10**9)
    assert (result.outcome, result.failed_rank, result.phase) == (Outcome.CRASHED, 1, "measure")
    assert result.reason == "rank 1 was killed by signal 9"
    assert zoo.run("ok", **CLEAN).losses == reference


@pytest.mark.system
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
    assert not with_argument("a child of tests/models/children.py")


def with_argument(argument: str) -> list[psutil.Process]:
    """Processes that were started with an argument."""
    return [process for process in psutil.process_iter(["cmdline"]) if argument in (process.info["cmdline"] or [])]


def test_a_daemon_that_hides_from_its_rank_outlives_no_trial(zoo: Zoo) -> None:
    assert zoo.run("daemon").outcome is Outcome.COMPLETE
    assert len([line for line in read_record(zoo.folder.exit, Exit).swept if line.startswith("process ")]) == 2
    assert not with_argument("a daemon of tests/models/daemon.py")


@pytest.mark.system
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


def test_an_op_that_cannot_be_built_is_one_sentence(zoo: Zoo) -> None:
    assert zoo.executor.build_op("no_such_op") == "DeepSpeed has no op no_such_op on this accelerator"


@pytest.mark.system
def test_a_build_lock_of_a_killed_rank_is_removed(
    tmp_path: Path, write_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path))  # trials of other test workers sweep the common folder of ops
    locking = """
        if self.calls == 3:
            lock = os.path.join(os.environ["TORCH_EXTENSIONS_DIR"], "an_op", "lock")
            os.makedirs(os.path.dirname(lock), exist_ok=True)
            os.open(lock, os.O_CREAT)
            os.kill(os.getpid(), signal.SIGKILL)"""
    with contextlib.closing(LocalExecutor([], tmp_path / "server.log")) as executor:
        zoo = Zoo(executor, tmp_path / "trials")
        result = zoo.run(write_model(in_forward(locking)))
        assert result.outcome is Outcome.CRASHED
        assert str(extensions_dir() / "an_op" / "lock") in read_record(zoo.folder.exit, Exit).swept
        assert build_locks() == []


@pytest.mark.system
def test_trials_leak_no_descriptor_of_the_server(zoo: Zoo) -> None:
    zoo.run("ok", **CLEAN)
    before = zoo.server.num_fds()
    for model in ("ok", "raises", "segv"):
        zoo.run(model, **CLEAN)
    # Between two trials it may try in a fork what it imports ahead, over a pipe.
    assert wait_until(lambda: zoo.server.num_fds() <= before)


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
    assert wait_until(lambda: job.poll() is Status.EXITED)
    assert zoo.run("ok", **CLEAN).losses == reference


def test_an_interrupt_stops_the_ranks_and_removes_what_their_script_saved(zoo: Zoo) -> None:
    def interrupt() -> None:
        if zoo.entered("measure"):
            (zoo.folder.scratch / "checkpoint").mkdir(parents=True)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        zoo.run("hang", interrupt)
    assert zoo.server.children(recursive=True) == [] and not zoo.folder.scratch.exists()


@pytest.mark.system
def test_a_late_cancel_does_not_reach_the_next_trial(zoo: Zoo, reference: list[float | None]) -> None:
    zoo.run("ok", **CLEAN)
    assert zoo.executor._server is not None and zoo.executor._server.stdin is not None
    zoo.executor._server.stdin.write(b'{"cancel": true}\n')
    assert zoo.run("ok", **CLEAN).losses == reference


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
