"""The agent's own instruments: commands, logs, shared memory."""

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

from autotune.trial import TrialDir, TrialRequest
from autotune.worker import network, server

MIB = 1 << 20


def running(path: Path, *, pids: set[int] = frozenset(), ranks: int = 1) -> server._Running:  # type: ignore[assignment]
    """A trial that has only begun."""
    path.mkdir(exist_ok=True)
    began = server._Running(TrialDir(path), TrialRequest(target="model.py"), 0, time.monotonic(), dict.fromkeys(range(ranks), -1))
    began.pids = set(pids)
    began.shared_before = frozenset(server._shared_memory())
    return began


def test_a_command_behind_another_stays_in_the_pipe() -> None:
    read, write = os.pipe()
    os.write(write, b'{"run": "a"}\nnot json\n{"cancel": true}\n')
    commands = server._commands(read)
    assert next(commands) == {"run": "a"}
    assert os.read(read, 100) == b'not json\n{"cancel": true}\n'
    os.write(write, b'not json\n{"run": "b"}\n{"run": "half')
    os.close(write)
    assert list(commands) == [{"run": "b"}]
    os.close(read)


def test_a_large_log_keeps_head_and_tail_and_the_writer_goes_on_behind(tmp_path: Path) -> None:
    begun = running(tmp_path)
    with open(begun.folder.log(0), "ab", buffering=0) as rank:
        rank.write(b"first\n" + b"x" * (17 * MIB) + b"\nlast")
        server._bound_logs(begun, server.LOG_LIMIT_BYTES)
        rank.write(b" word\n")
    log = begun.folder.log(0).read_bytes()
    assert log.startswith(b"first\n") and log.endswith(b"\nlast word\n")
    assert b"[autotune: the log grew too large; lines were cut here]" in log
    assert len(log) < 2 * MIB + 200


def test_a_small_or_missing_log_is_left_alone(tmp_path: Path) -> None:
    begun = running(tmp_path, ranks=2)
    begun.folder.log(0).write_bytes(b"x" * MIB)
    server._bound_logs(begun, server.LOG_LIMIT_BYTES)
    assert begun.folder.log(0).stat().st_size == MIB


@pytest.fixture
def shared() -> Iterator[str]:
    """A prefix for files in /dev/shm, which are removed afterwards."""
    prefix = f"autotune-test-{uuid.uuid4().hex[:8]}"
    yield prefix
    for path in Path("/dev/shm").glob(f"*{prefix}*"):
        path.unlink()


def test_shared_memory_named_for_a_process_of_the_trial_is_the_trials(tmp_path: Path, shared: str) -> None:
    begun = running(tmp_path, pids={4711})
    for name in (f"{shared}_4711_0", f"{shared}_14711_0", f"{shared}_47110", f"{shared}-4711.x"):
        Path("/dev/shm", name).touch()
    assert {path.name for path in server._left_in_shared_memory(begun)} == {f"{shared}_4711_0", f"{shared}-4711.x"}


def test_shared_memory_from_before_the_trial_is_not(tmp_path: Path, shared: str) -> None:
    Path("/dev/shm", f"{shared}_4711").touch()
    Path("/dev/shm", f"psm_{shared}").touch()
    assert server._left_in_shared_memory(running(tmp_path, pids={4711})) == []


def test_nameless_shared_memory_is_the_trials_only_if_nobody_alive_maps_it(tmp_path: Path, shared: str) -> None:
    begun = running(tmp_path)
    used, left = Path("/dev/shm", f"psm_{shared}_used"), Path("/dev/shm", f"psm_{shared}_left")
    for path in (used, left):
        path.write_bytes(bytes(4096))
    with open(used, "r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert server._left_in_shared_memory(begun) == [left]


def test_a_rank_finds_the_variables_that_torchrun_sets() -> None:
    request = TrialRequest(target="", world_size=4, nodes=2)
    variables = server.rank_environment(3, request) | network.environment("127.0.0.1", 29500, 1)
    assert variables == {
        "RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
    }  # fmt: skip


def test_gloo_and_nccl_take_the_interface_that_leads_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")  # as the server has it for trials on one machine
    found = network.environment("127.0.0.1", 29500, 2)
    assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"] == network.interface_to("127.0.0.1", 29500)
    assert network.environment("127.0.0.1", 29500, 1).keys() == {"MASTER_ADDR", "MASTER_PORT"}
    assert network.interface_to("no.such.host.invalid", 29500) is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert "GLOO_SOCKET_IFNAME" not in network.environment("127.0.0.1", 29500, 2)  # the user's own


def test_what_does_not_survive_a_fork_is_found_by_trying_and_told_why() -> None:
    def fails() -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess\nand more")

    assert server.tried_in_a_fork(lambda: None) is None
    assert server.tried_in_a_fork(fails) == "RuntimeError: Cannot re-initialize CUDA in forked subprocess"
    assert server.tried_in_a_fork(lambda: os.kill(os.getpid(), 9)) == "exit status -9"


def test_an_unknown_role_is_refused() -> None:
    done = subprocess.run([sys.executable, "-m", "autotune.worker", "sing"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("usage: ")
