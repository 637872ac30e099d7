"""What every engine owes a trial on two machines: its end has a name, nothing is left, losses are as on one machine."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.clusters import ray_cluster, slurm, two_hosts, until, why_no_hosts, why_no_ray, why_no_slurm
from support.zoo import CLEAN, ENDS, End, Zoo, shared_memory, wait_until

from autotune.executors import base
from autotune.executors.base import Status
from autotune.executors.cluster import ClusterExecutor, settings_for
from autotune.executors.ray import Ray
from autotune.executors.slurm import Slurm
from autotune.executors.ssh import Hosts, read_hostfile
from autotune.trial.folder import read_record, write_record
from autotune.trial.result import Exit, Outcome

pytestmark = pytest.mark.system
TWO = {"nodes": 2, "world_size": 2}
# One trial of each kind; the whole zoo runs on the local engine.
KINDS = [end for end in ENDS if end.model in ("oom", "hang", "nan", "crash_rank1")]


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """One Ray cluster for both ways of carrying files."""
    if why := why_no_ray():
        pytest.skip(why)
    with ray_cluster():
        yield


@pytest.fixture(scope="module", params=["slurm", "ray", "ray-without-shared-files", "ssh"])
def machines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterExecutor]:
    """An engine with two machines, its agents warm."""
    root = tmp_path_factory.mktemp("engine")
    settings = settings_for(["torch"], {}, 60.0)
    if request.param == "slurm":
        if why := why_no_slurm():
            pytest.skip(why)
        with slurm(root / "cluster"):
            executor = ClusterExecutor(Slurm({}, 1, "autotune-tests"), root / "agents", settings, 2)
            executor.start()
            yield executor
            executor.close()
    elif request.param == "ssh":
        if why := why_no_hosts():
            pytest.skip(why)
        with two_hosts(root / "hosts") as hosts:
            options = {"ssh": hosts.ssh, "address": "10.203.0.1"}
            executor = ClusterExecutor(
                Hosts(options, list(read_hostfile(hosts.hostfile))), root / "agents", settings, 2
            )
            executor.start()
            yield executor
            executor.close()
    else:
        request.getfixturevalue("ray_here")
        files = "ray" if request.param.endswith("files") else "auto"
        executor = ClusterExecutor(Ray({"files": files}, 1), root / "agents", settings, 2)
        executor.start()
        yield executor
        executor.close()


@pytest.fixture
def zoo(machines: ClusterExecutor, tmp_path: Path) -> Iterator[Zoo]:
    """Runs trials on the engine; afterwards only its warm servers may be there."""
    before = shared_memory()
    zoo = Zoo(machines, tmp_path / "trials")
    yield zoo
    assert wait_until(lambda: ranks() == []), ranks()
    assert wait_until(lambda: not shared_memory() - before)


def ranks() -> list[psutil.Process]:
    """Processes forked by warm servers that were started from here."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if command[1:4] == ["-m", "autotune.worker", "serve"]:
            try:
                parent = process.parent()
                forked = parent is not None and parent.cmdline()[1:4] == ["-m", "autotune.worker", "serve"]
                if forked and process.cwd() == str(Path.cwd()):
                    found.append(process)
            except psutil.Error:
                continue
    return found


@pytest.mark.smoke
def test_a_trial_spans_two_machines_and_learns_what_it_learns_on_one(
    zoo: Zoo, executor: object, tmp_path: Path
) -> None:
    result = zoo.run("ok", **TWO, **CLEAN)
    assert result.outcome is Outcome.COMPLETE, result
    assert read_record(zoo.folder.exit, Exit).codes == {0: 0, 1: 0}
    alone = Zoo(executor, tmp_path / "alone").run("ok", **CLEAN)  # type: ignore[arg-type]
    assert result.losses == alone.losses
    assert {"rank-0.log", "rank-1.log", "node-0.json", "node-1.json", "result.json"} <= zoo.folder.names()


@pytest.mark.parametrize("end", KINDS, ids=lambda end: end.model)
def test_a_bad_trial_is_named_for_what_it_is(zoo: Zoo, end: End) -> None:
    result = zoo.run(end.model, **TWO, **({"deadline_s": 3.0} if end.model == "hang" else end.what or {}))
    assert (result.outcome, result.phase) == (end.outcome, end.phase), result
    assert re.search(
        r"^no end within 3 s; rank 0 waited for rank 1" if end.model == "hang" else end.reason, result.reason
    ), result.reason
    assert end.rank is None or result.failed_rank == end.rank


def test_a_noisy_trial_is_measured(zoo: Zoo) -> None:
    result = zoo.run("noisy", **TWO, budget_s=0.5)
    assert result.outcome is Outcome.COMPLETE and result.steps is not None and result.steps.n_steps > 0


def test_a_trial_on_one_machine_leaves_the_other_alone(zoo: Zoo) -> None:
    assert zoo.run("ok", world_size=1, **CLEAN).outcome is Outcome.COMPLETE
    assert "node-1.json" not in zoo.folder.names()


def test_a_cancelled_trial_is_lost_and_the_machines_stay(zoo: Zoo) -> None:
    zoo.run("ok", **TWO, **CLEAN)
    request = zoo.request("hang", **TWO)
    folder = zoo.next_folder()
    write_record(folder.request, request)
    write_record(folder.ds_config, request.ds_config)
    job = zoo.executor.submit(folder)
    until(lambda: job.poll() is Status.RUNNING and zoo.entered("measure"), 30)
    job.cancel()
    job.cancel()
    assert job.poll() is Status.EXITED
    assert base.conclude(folder, request).outcome is Outcome.LOST
    start = time.monotonic()
    assert zoo.run("ok", **TWO, **CLEAN).outcome is Outcome.COMPLETE
    assert time.monotonic() - start < base.AGENT_GRACE_S


def test_a_trial_goes_on_without_its_coordinator_and_is_found_again(zoo: Zoo, machines: ClusterExecutor) -> None:
    """A second executor plays the coordinator that comes after the first one has died without a word."""
    if machines.engine.name == "ssh":
        pytest.skip("agents over ssh end with the run that started them")
    request = zoo.request("noisy", **TWO, budget_s=2.0, min_samples=10**9)
    folder = zoo.next_folder()
    write_record(folder.request, request)
    write_record(folder.ds_config, request.ds_config)
    job = machines.submit(folder)
    until(lambda: job.poll() is Status.RUNNING, 30)
    said = json.loads(folder.job.read_text())
    options = machines.engine.options
    engine = Slurm(options, 1, "x") if machines.engine.name == "slurm" else Ray(options, 1)
    second = ClusterExecutor(engine, machines.root, machines.settings, 2)
    result = base.resume(second, folder.path)
    assert result is not None and result.outcome is Outcome.COMPLETE, result
    assert json.loads(folder.job.read_text()) == said
    assert result.wall_s > 1.5


def test_an_op_is_compiled_on_every_machine(machines: ClusterExecutor) -> None:
    assert machines.build_op("no_such_op") == "DeepSpeed has no op no_such_op on this accelerator"
