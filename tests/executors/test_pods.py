"""The engine in the pods of a JobSet: who is called, who comes, and what it means when a pod is gone."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import ClassVar

import pytest

from autotune.errors import UserError
from autotune.executors import pods
from autotune.executors.base import Status
from autotune.executors.node_agent import Settings, Spool
from autotune.executors.pods import Board, Machine, Pods
from autotune.trial.folder import write_record


class Agent:
    """In place of an agent's process."""

    started: ClassVar[list[list[str]]] = []

    def __init__(self, command: list[str], **_: object) -> None:
        self.returncode: int | None = None
        Agent.started.append(command)

    def poll(self) -> int | None:
        return self.returncode

    def terminate(self) -> None:
        self.returncode = 143

    def wait(self, _: float | None = None) -> int | None:
        return self.returncode


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pods:
    monkeypatch.setattr(pods.subprocess, "Popen", Agent)
    monkeypatch.setattr(Agent, "started", [])
    monkeypatch.setenv(pods.BOARD, str(tmp_path / "studies" / "s" / "pods"))
    monkeypatch.setenv(pods.MACHINES, "2")
    return Pods({})


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    spool = Spool(tmp_path / "spool")
    write_record(spool.settings, Settings(modules=[]))
    return spool


def machines(engine: Pods) -> tuple[Machine, Machine]:
    return tuple(Machine(engine.board, number, f"10.0.0.{number}") for number in (0, 1))  # type: ignore[return-value]


def status(engine: Pods, job: str) -> Status:
    return engine.standing(job).status


def test_pods_come_when_they_are_called_and_meet_at_the_first_one(engine: Pods, spool: Spool) -> None:
    first, second = machines(engine)
    first.look()
    second.look()
    assert Agent.started == []
    job = engine.launch(spool, 2)
    second.look()
    assert engine.standing(job).reason == "kubernetes: waiting for the pods of machines 0, 1"
    first.look()
    assert engine.standing(job).reason == "kubernetes: waiting for the pods of machines 1"
    second.look()
    assert status(engine, job) is Status.RUNNING
    assert [(each[-3], each[-1]) for each in Agent.started] == [("0", "10.0.0.0"), ("1", "10.0.0.0")]
    engine.end(job)
    first.look()
    second.look()
    assert status(engine, job) is Status.TAKEN and engine.board.read(first.file) == {}
    again = engine.launch(spool, 1)
    second.look()
    first.look()
    assert status(engine, again) is Status.RUNNING and len(Agent.started) == 3  # the second one is not needed


# What happens to the pod of machine 1, by what the engine then says.
def evicted(engine: Pods, machine: Machine) -> None:
    machine.taken()


def replaced(engine: Pods, machine: Machine) -> None:
    new = Machine(engine.board, 1, "10.0.0.9")
    new._say(engine.board.read(new.file) | {"ended": pods.TAKEN})  # as `serve` begins
    new.look()


def vanished(engine: Pods, machine: Machine) -> None:
    engine._beats = {n: (beat, at - 2 * pods.SILENT_S) for n, (beat, at) in engine._beats.items()}


def agent_killed(engine: Pods, machine: Machine) -> None:
    assert machine._agent is not None
    machine._agent.returncode = -9
    machine.look()


def agent_idle(engine: Pods, machine: Machine) -> None:
    assert machine._agent is not None
    machine._agent.returncode = 0
    machine.look()


def called_away(engine: Pods, machine: Machine) -> None:
    write_record(engine.board.call, {"id": "other", "spool": "x", "nodes": 1})


@pytest.mark.parametrize(
    ("happens", "expected"),
    [
        (evicted, Status.TAKEN), (replaced, Status.TAKEN), (vanished, Status.TAKEN), (agent_killed, Status.LOST),
        (agent_idle, Status.EXITED), (called_away, Status.TAKEN),
    ],
)  # fmt: skip
def test_what_becomes_of_a_pod_is_told_apart(engine: Pods, spool: Spool, happens, expected) -> None:
    job = engine.launch(spool, 2)
    first, second = machines(engine)
    first.look()
    second.look()
    assert status(engine, job) is Status.RUNNING
    happens(engine, second)
    assert status(engine, job) is expected and "kubernetes: " in engine.standing(job).reason
    assert len(Agent.started) == 2  # nobody takes the same call up twice


def test_a_new_driver_finds_the_call_of_the_one_before(engine: Pods, spool: Spool) -> None:
    job = engine.launch(spool, 1)
    machines(engine)[0].look()
    assert status(Pods({}), job) is Status.RUNNING


def test_a_pod_that_lives_is_heard_and_a_torn_file_is_waited_for(engine: Pods, spool: Spool, monkeypatch) -> None:
    monkeypatch.setattr(pods, "BEAT_S", 0.0)
    job = engine.launch(spool, 1)
    first, _ = machines(engine)
    first.look()
    assert status(engine, job) is Status.RUNNING
    vanished(engine, first)
    os.utime(first.file, (1, 1))
    first.look()
    assert status(engine, job) is Status.RUNNING and abs(first.file.stat().st_mtime - time.time()) < 60
    first.file.write_text('{"job": ')
    assert Board(engine.board.path).read(first.file) == {}
    assert json.loads(engine.board.call.read_text())["id"] == job


def test_a_pod_goes_on_while_the_volume_is_away(engine: Pods, spool: Spool) -> None:
    job, call = engine.launch(spool, 1), engine.board.call
    first, _ = machines(engine)
    first.look()
    call.rename(call.with_name("away"))
    call.mkdir()  # reading it fails, as of a file on a volume that is away
    with pytest.raises(OSError, match="directory"):
        first.look()
    call.rmdir()
    call.with_name("away").rename(call)
    first.look()
    assert status(engine, job) is Status.RUNNING and len(Agent.started) == 1


def test_more_machines_than_the_job_set_has_are_refused(engine: Pods) -> None:
    engine.check(2)
    with pytest.raises(UserError, match="3 machines are asked for, and the JobSet has 2"):
        engine.check(3)
