"""What an engine does to a trial is no observation of its configuration: machines that go away, or cannot be had."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest
from support.clusters import free_ports
from support.instant import Instant, report, runner_of

from autotune.errors import Unavailable, UserError
from autotune.executors import base
from autotune.executors.base import MachinesGone, Status
from autotune.executors.cluster import ClusterExecutor, JobState, Refused, settings_for
from autotune.executors.node_agent import Spool
from autotune.executors.ray import Ray, _check_listens, _Group
from autotune.executors.ray_machine import NEVER_STARTED, Machine
from autotune.executors.ssh import Hosts
from autotune.space.candidate import Candidate
from autotune.system import files
from autotune.system.owner import Owner
from autotune.trial.failures import means_host_memory
from autotune.trial.folder import TrialDir, read_record, write_record
from autotune.trial.request import TrialRequest
from autotune.trial.result import Exit, Outcome

REQUEST = TrialRequest(target="model.py", candidate=Candidate(micro_batch_size=1).values())


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "RETRY_S", (0.01, 0.02))
    monkeypatch.setattr(base, "TICK_S", 0.0)
    for name in ("LOOK_S", "ASK_S", "SETTLE_S"):
        monkeypatch.setattr(f"autotune.executors.cluster.{name}", 0.0)


class Machines:
    """An engine whose jobs go through stated states; a job that is `running` to its end completes the trial."""

    name, hold, turns = "stand-in", True, 0

    def __init__(self, *jobs: str | list[Status]) -> None:
        self.jobs, self.options = list(jobs), {}
        self.spool, self.n_launched = Spool(Path()), 0

    def check(self, nodes: int) -> None:
        """Does nothing."""

    def launch(self, spool: Spool, nodes: int) -> str:
        self.n_launched += 1
        job = self.jobs.pop(0)
        if isinstance(job, str):
            raise Refused(job.rstrip("?"), at_present=job.endswith("?"))
        self.spool, self.states = spool, list(job)
        return str(self.n_launched)

    def standing(self, job: str) -> JobState:
        status = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        (order,) = self.spool.ordered() or [{}]
        if status is Status.RUNNING and order:
            folder = TrialDir(Path(order["run"]))
            write_record(folder.node(0), {})
            if self.states == [Status.RUNNING]:
                write_record(folder.report(0), report(Candidate(micro_batch_size=1)))
                write_record(folder.exit, Exit(codes={0: 0}))
        return JobState(status, f"the job is {status}")

    def end(self, job: str) -> None:
        self.states = [Status.TAKEN]

    def exchange(self, job: str, spool: Spool, folder: TrialDir) -> None:
        """Does nothing."""


def executor_on(engine: Machines, folder: Path, patience_s: float = 60.0) -> ClusterExecutor:
    return ClusterExecutor(engine, folder / "agents", settings_for([], {}, 1.0), 1, patience_s=patience_s)


def test_the_variables_that_agents_read_do_not_stay_when_the_run_ends(tmp_path: Path) -> None:
    """Tokens lay in the study's folder for good; a job that still ends when the next run begins is not taken over."""
    engine = Machines(RUNS)
    executor = executor_on(engine, tmp_path)
    base.run(executor, tmp_path / "0000", REQUEST)
    engine.spool.start(0).touch()
    executor.close()
    assert {path.name for path in engine.spool.path.iterdir()} == {"alive", "allocation.json", "orders.json"}
    engine.states = [Status.RUNNING]
    files.write_text(
        engine.spool.path / "allocation.json", '{"engine": "stand-in", "id": "1", "nodes": 1, "options": {}}'
    )
    os.utime(engine.spool.alive, (0, 0))
    again = executor_on(engine, tmp_path)
    again.start()
    assert again._held == []


RUNS, TAKEN, LOST, STILLBORN, NEVER = (
    [Status.RUNNING] * 3,
    [Status.RUNNING, Status.RUNNING, Status.TAKEN],
    [Status.RUNNING, Status.RUNNING, Status.LOST],
    [Status.LOST],
    [Status.REFUSED],
)
REQUEUED = [Status.RUNNING, Status.RUNNING, Status.QUEUED]  # fmt: skip


# State of each attempt in turn (a text is a refusal to start it, `?` at its end: at present), and what happens.
POLICY = {
    "its ranks end it": ([RUNS], "complete"),
    "an agent dies once": ([LOST, RUNS], "complete"),
    "an agent dies twice": ([LOST, LOST], "crashed"),
    "an agent dies twice, with an outage between": ([LOST, TAKEN, LOST], "crashed"),
    "agents do not even start": ([STILLBORN, STILLBORN], "no rank was started, so the machines are at fault"),
    "machines go away": ([TAKEN, RUNS], "complete"),
    "machines go away again and again": ([TAKEN] * 9 + [RUNS], "complete"),
    "its job goes back into the queue": ([REQUEUED, REQUEUED, RUNS], "complete"),
    "an agent dies once, machines go away": ([LOST, TAKEN, TAKEN, RUNS], "complete"),
    "fewer machines than before": ([TAKEN, "the cluster has 1", "the cluster has 1", RUNS], "complete"),
    "what ran before cannot be started": ([TAKEN, NEVER, RUNS], "complete"),
    "no job is taken at present": (["too many jobs?", "too many jobs?", RUNS], "complete"),
    "a cluster that never had them": (["the cluster has 1"], "stand-in: the cluster has 1"),
    "a job that can never start": ([NEVER], "the job is refused"),
    "machines stay away": ([TAKEN, *["the cluster has 1"] * 99], "the same command continues the study"),
    "machines never stay": ([TAKEN] * 99, "the same command continues the study"),
}


@pytest.mark.parametrize("case", POLICY)
def test_what_an_end_means_is_one_policy_for_all_engines(case, tmp_path):
    jobs, expected = POLICY[case]
    engine, ticks = Machines(*jobs), []
    executor = executor_on(engine, tmp_path, 0.2 if len(jobs) > 20 else 60.0)
    if expected in ("complete", "crashed"):
        result = base.run(executor, tmp_path / "0", REQUEST, lambda: ticks.append(1))
        assert str(result.outcome) == expected
        assert engine.n_launched == len(jobs)
        return
    with pytest.raises(UserError, match=expected) as refused:
        base.run(executor, tmp_path / "0", REQUEST, lambda: ticks.append(1))
    is_outage = "continues" in expected
    assert (refused.value.status, isinstance(refused.value, MachinesGone)) == ((75, True) if is_outage else (2, False))
    assert engine.n_launched > 2 and len(ticks) > 2 if is_outage else engine.n_launched == len(jobs)
    assert not TrialDir(tmp_path / "0").result.exists()


def test_a_later_run_knows_what_machines_the_study_has_had(tmp_path):
    base.run(executor_on(Machines(RUNS), tmp_path), tmp_path / "0", REQUEST)
    later = executor_on(Machines("the cluster has 0", RUNS), tmp_path)
    assert base.run(later, tmp_path / "1", REQUEST).outcome is Outcome.COMPLETE
    wider = replace(REQUEST, nodes=2, world_size=2)
    with pytest.raises(UserError, match="the cluster has 1"):
        base.run(executor_on(Machines("the cluster has 1"), tmp_path), tmp_path / "2", wider)


class Outage(Instant):
    """Takes the machines of the trials with these numbers away for good, once each."""

    patience_s = 0.0
    reason = "slurm: job 7 ended as NODE_FAIL (a node failed)"

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.numbers, self.n = set(numbers), -1
        self.status = Status.EXITED

    def submit(self, folder: TrialDir) -> Instant:
        if not read_record(folder.request, TrialRequest).noise:
            self.n += 1
        self.status = Status.TAKEN if self.n in self.numbers else Status.EXITED
        self.numbers.discard(self.n)
        return self if self.status is Status.TAKEN else super().submit(folder)

    def poll(self) -> Status:
        return self.status


@pytest.mark.parametrize("number", [0, 2])
def test_an_outage_is_booked_against_no_configuration_and_the_study_resumes(number, tmp_path):
    with pytest.raises(MachinesGone, match="NODE_FAIL"):
        runner_of(tmp_path, Outage(number), trials=4, finalists=0).run()
    runner = runner_of(tmp_path, Instant(), trials=4, finalists=0)
    runner.run()
    assert [each.outcome for each in runner.state.measured()] == [Outcome.COMPLETE] * 4


def test_a_host_that_was_never_reached_refuses_and_one_that_is_lost_does_not(tmp_path):
    class Connection:
        returncode = None

        def poll(self) -> int | None:
            return self.returncode

    hosts, spool, connection = Hosts({}, ["a"]), Spool(tmp_path), Connection()
    hosts._running["job"] = spool, [connection]  # type: ignore[list-item]
    connection.returncode = 255
    for said in ("ssh: Could not resolve hostname a", "ann@a: Permission denied (publickey)."):
        (tmp_path / "ssh-0.log").write_text(f"{said}\n")
        assert hosts.standing("job").status is Status.REFUSED, said
    for said in ("Connection to 10.0.0.1 closed by remote host.", "Timeout, server a not responding.", ""):
        (tmp_path / "ssh-0.log").write_text(f"{said}\n")
        assert hosts.standing("job").status is Status.TAKEN, said  # it was there before an agent could say so
    (tmp_path / "ssh-0.log").unlink()
    connection.returncode = None
    write_record(spool.node(0), {"host": "a"})
    assert hosts.standing("job").status is Status.RUNNING
    for code, status in ((255, Status.TAKEN), (-9, Status.TAKEN), (1, Status.LOST)):
        connection.returncode = code
        assert hosts.standing("job").status is status


def test_machines_are_taken_over_from_a_run_that_is_dead(tmp_path):
    engine = Machines([Status.QUEUED])
    first, second = (executor_on(engine, tmp_path) for _ in range(2))
    job, own = first._allocation(1).job, Owner.here()
    (path,) = first.root.glob("*/allocation.json")
    said = files.json_object(path)
    for owner, quiet_s, taken in (
        (own, 999.0, False),
        (replace(own, started="1"), 0.0, True),  # the number is used again
        (replace(own, kernel="another"), 60.0, False),
        (replace(own, kernel="another"), 999.0, True),
    ):
        second._held.clear()
        write_record(path, said | {"owner": str(owner)})
        os.utime(path.with_name("alive"), (time.time() - quiet_s,) * 2)
        second.start()
        assert [held.job for held in second._held] == [job] * taken, (owner, quiet_s)


@pytest.mark.system
def test_a_driver_that_is_killed_twice_in_a_trial_marks_no_configuration(tmp_path, monkeypatch):
    # An interrupted run leaves its trial as a driver that is killed does.
    monkeypatch.setattr("autotune.study.runner.Runner._give_back", lambda *_: None)
    ran = []
    for _ in range(3):
        executor = Instant()
        executor.stop_at = 0 if ran else 2
        with pytest.raises(KeyboardInterrupt):
            runner_of(tmp_path, executor, trials=5, finalists=0).run()
        ran.append(executor.ran[-1])
    assert ran[0] == ran[1] == ran[2]
    runner = runner_of(tmp_path, Instant(), trials=5, finalists=0)
    runner.run()
    assert [each.outcome for each in runner.state.measured()] == [Outcome.COMPLETE] * 5


@pytest.mark.parametrize(
    ("kind", "what", "on_host"),
    [
        ("std::bad_alloc", "std::bad_alloc", True),
        ("c10::OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity", False),
    ],
)
def test_an_abort_for_lack_of_memory_is_read_from_the_ranks_log(tmp_path, kind, what, on_host):
    folder = TrialDir(tmp_path)
    write_record(folder.exit, Exit(codes={0: -6}, first_failed=0))
    folder.log(0).write_text(f"terminate called after throwing an instance of '{kind}'\n  what():  {what}\n")
    found = base.conclude(folder, REQUEST)
    assert found.outcome is Outcome.OOM and means_host_memory(found.reason) is on_host
    folder.log(0).write_text("terminate called after throwing an instance of 'std::logic_error'\n")
    assert base.conclude(folder, REQUEST).outcome is Outcome.CRASHED


def test_a_cluster_of_ray_at_whose_address_nobody_listens_is_told_at_once():
    (port,) = free_ports(1)
    for address in (f"127.0.0.1:{port}", f"[::1]:{port}", f"no-such-host.invalid:{port}"):
        with pytest.raises(Unavailable, match=r"no cluster answers at .*; is its head running\?"):
            _check_listens(address)
    with socket.create_server(("127.0.0.1", 0)) as server:
        _check_listens(f"127.0.0.1:{server.getsockname()[1]}")
    for address in ("auto", "local"):  # these are Ray's to understand
        _check_listens(address)
    with pytest.raises(UserError, match="give the head's as HOST:PORT"):
        _check_listens("ray://head:10001")


def test_machines_of_ray_whose_driver_died_before_it_started_an_agent_are_taken_away(monkeypatch):
    ray = types.SimpleNamespace(
        wait=lambda calls, **_: (calls, []), get=lambda call: call, exceptions=types.SimpleNamespace(RayError=Exception)
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    machine = Machine("g", 0)
    actor = types.SimpleNamespace(state=types.SimpleNamespace(remote=machine.state))
    group = _Group(None, [actor], [machine.is_apart()])
    assert group.failure() == (Status.RUNNING, "")
    assert group.failure() == (Status.TAKEN, NEVER_STARTED)


def test_a_run_whose_ray_cluster_lost_its_head_leaves_it_and_is_told_to_come_again(monkeypatch):
    """Ray ends a process that stays connected to no head after a minute, with no word of ours."""
    left = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    context = types.SimpleNamespace(gcs_address=address)
    connected = types.SimpleNamespace(
        is_initialized=lambda: not left, get_runtime_context=lambda: context, shutdown=lambda: left.append("left")
    )
    monkeypatch.setitem(sys.modules, "ray", connected)
    engine = Ray({"address": address}, None)
    state = engine.standing("autotune-1")
    assert (state.status, left) == (Status.TAKEN, ["left"]) and "head of the cluster is gone" in state.reason
    engine.end("autotune-1")  # asks nobody
    with pytest.raises(Unavailable, match="is its head running"):
        engine.check(1)


def test_other_machines_have_the_settings_of_the_allocator_and_choose_their_own_devices(monkeypatch):
    """Memory depends on them: with expandable segments torch's allocator wastes less."""
    asked = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "FI_PROVIDER": "efa",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    exported = settings_for([], {}, 1.0).exported
    assert {name for name in asked if name in exported} == asked.keys() - {"CUDA_VISIBLE_DEVICES"}


@pytest.mark.parametrize(("chosen", "handed_on"), [("2,3", True), ("GPU-5a7e", False), ("", False)])
def test_over_ssh_nobody_else_chooses_the_devices_that_the_user_numbers(monkeypatch, tmp_path, chosen, handed_on):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: None)
    spool = Spool(tmp_path)
    write_record(spool.settings, settings_for([], {}, 1.0))
    Hosts({}, ["a"]).launch(spool, 1)
    assert (f"export CUDA_VISIBLE_DEVICES={chosen}\n" in (tmp_path / "start-0.sh").read_text()) is handed_on


def test_machines_beside_one_that_went_away_are_given_back_in_the_end(tmp_path: Path, monkeypatch) -> None:
    """Their agents waited for as long as the process lived, in a notebook for hours."""
    engine, ended = Machines([Status.QUEUED, Status.TAKEN]), list[str]()
    executor = executor_on(engine, tmp_path, patience_s=0.0)
    with pytest.raises(base.MachinesGone):
        base.run(executor, tmp_path / "0000", REQUEST)
    monkeypatch.setattr(engine, "end", ended.append)
    executor.close()
    assert ended == ["1"]
