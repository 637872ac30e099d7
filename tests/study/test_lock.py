"""The study's lock: one run at a time; a new run ends the processes and removes the files of a killed one."""

import errno
import fcntl
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.zoo import wait_until

from autotune.errors import UserError
from autotune.study import lock
from autotune.study.lock import run_under_way, study_lock
from autotune.system import signals, temporary
from autotune.system.owner import Owner
from autotune.system.processes import MARK, new_mark, run_mark
from autotune.system.signals import Terminated, status_of, undisturbed

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


def killed_run(folder, mark):
    """A folder whose last run was killed: the lock is free, and still says whose processes were its."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".lock").write_text(json.dumps({"process": "999999999:1", "agent": mark}))


def test_a_copy_of_a_folder_whose_study_runs_leaves_the_processes_of_that_run_alone(tmp_path, monkeypatch):
    """Whoever copied a project while it was tuned, and ran the copy, killed the servers of the first run."""
    swept = list[str]()
    monkeypatch.setattr(lock, "sweep", swept.append)
    with study_lock(tmp_path / "s"):
        shutil.copytree(tmp_path / "s", tmp_path / "copy")
        with study_lock(tmp_path / "copy"):
            assert swept == []
    killed_run(tmp_path / "copy", "a-run-that-was-killed")
    with study_lock(tmp_path / "copy"):
        assert swept == ["a-run-that-was-killed"]


@pytest.mark.process
def test_every_process_of_a_killed_run_is_ended_whichever_of_its_servers_began_it(tmp_path):
    marks = [run_mark() + "x", run_mark() + "x.0a1b2c3d", run_mark() + "xy"]
    processes = [subprocess.Popen(SLEEP, env={**os.environ, MARK: mark}, start_new_session=True) for mark in marks]
    try:
        killed_run(tmp_path / "s", run_mark() + "x")
        assert wait_until(lambda: all(len(Path(f"/proc/{p.pid}/environ").read_bytes()) > 0 for p in processes))
        with study_lock(tmp_path / "s"):
            assert [process.wait(60) for process in processes[:2]] == [-signal.SIGKILL] * 2
            assert processes[2].poll() is None  # of another run
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_run_that_ends_by_itself_takes_its_mark_back(tmp_path):
    with study_lock(tmp_path):
        said = json.loads((tmp_path / ".lock").read_text())
        assert (
            Owner.read(said["process"]).lives()
            and said["agent"] == run_mark()
            and run_under_way(tmp_path) == os.getpid()
        )
    assert (tmp_path / ".lock").read_text() == ""
    with pytest.raises(RuntimeError), study_lock(tmp_path):
        raise RuntimeError
    assert (tmp_path / ".lock").read_text() == ""


@pytest.mark.process
def test_the_marks_of_all_servers_of_a_process_begin_alike_and_those_of_a_fork_do_not():
    first, second = new_mark(), new_mark()
    assert first != second and all(mark.startswith(run_mark() + ".") for mark in (first, second))
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, run_mark().encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 100).decode() != run_mark()
    os.close(read)
    os.close(write)


@pytest.mark.alone  # it removes what tests of another worker leave to be found
def test_shared_memory_of_a_killed_run_is_removed(tmp_path):
    killed_run(tmp_path, "a-run-that-was-killed")
    left, alive = Path(f"/dev/shm/torch_999999999_{os.getpid()}_0"), Path(f"/dev/shm/torch_{os.getpid()}_999_0")
    try:
        for path in (left, alive):
            path.touch()
        with study_lock(tmp_path):
            assert not left.exists() and alive.exists()
    finally:
        for path in (left, alive):
            path.unlink(missing_ok=True)


def test_temporary_folders_of_a_killed_run_are_removed(tmp_path, monkeypatch):
    """Where driver and server were killed together nobody else did."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed_run(tmp_path / "s", "a" * 32)
    left, other = (tmp_path / f"{temporary.prefix(f'{digit * 32}.00000000')}x" for digit in "ab")
    for folder in (left, other):
        folder.mkdir()
    with study_lock(tmp_path / "s"):
        assert not left.exists() and other.exists()


def test_drafts_of_a_killed_run_are_removed(tmp_path):
    drafts = [tmp_path / ".front.json.1.999999999", tmp_path / "trials" / "0001" / ".branch.json.1.999999999"]
    for draft in drafts:
        draft.parent.mkdir(parents=True, exist_ok=True)
        draft.touch()
        os.utime(draft, (0, 0))
    with study_lock(tmp_path):
        assert not any(draft.exists() for draft in drafts)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_is_put_off_and_its_status_says_by_what(number, status):
    done = []
    with pytest.raises(KeyboardInterrupt) as stop, signals.terminable(), undisturbed():
        done.append(os.kill(os.getpid(), number))
    assert done and status_of(stop.value) == status


def test_sigterm_comes_as_an_interrupt():
    with pytest.raises(Terminated), signals.terminable():
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_second_run_of_a_study_is_refused_with_the_number_of_the_first(tmp_path):
    with (
        study_lock(tmp_path / "s"),
        pytest.raises(UserError, match=rf"study 's' is being run by process {os.getpid()} on {platform.node()}"),
        study_lock(tmp_path / "s"),
    ):
        pass


@pytest.mark.process
def test_the_lock_is_free_after_a_run_and_after_a_killed_one(tmp_path):
    with study_lock(tmp_path / "s"):
        pass
    pid = os.fork()
    if pid == 0:
        descriptor = os.open(tmp_path / "s" / ".lock", os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    with study_lock(tmp_path / "s"):
        assert run_under_way(tmp_path / "s") == os.getpid()


@pytest.mark.parametrize("text", ["{nonsense", "[1]", "7", '{"process": 7, "agent": null}'])
def test_a_lock_file_full_of_nonsense_is_no_obstacle(tmp_path, text):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / ".lock").write_text(text)
    with study_lock(tmp_path / "s"):
        assert run_under_way(tmp_path / "s") == os.getpid()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_that_does_not_lock_is_named_with_what_to_do(tmp_path, monkeypatch, number):
    """It was an error of autotune itself, and `status` failed likewise."""

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match=r"s/\.lock cannot be locked .*another file system"), study_lock(tmp_path / "s"):
        pass
    assert run_under_way(tmp_path / "s") is None
