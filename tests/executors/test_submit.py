"""The driver as a job: the same run inside Slurm, Ray or Kubernetes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.clusters import SlurmCluster, ray_cluster, until, why_no_ray

from autotune.cli.submit import run_arguments
from autotune.errors import UserError
from autotune.executors import submit
from autotune.executors.cluster import Refused
from autotune.executors.node_agent import Spool
from autotune.executors.slurm import Steps

# In place of the interpreter: notes where it runs, ends with status 75 the first time and with 0 the second.
DRIVER = """#!/bin/sh
echo "$SLURM_JOB_ID $*" >> runs
[ "$(wc -l < runs)" -gt 1 ] || exit 75
"""


@pytest.fixture
def job(tmp_path: Path) -> submit.DriverJob:
    (tmp_path / "driver").write_text(DRIVER)
    (tmp_path / "driver").chmod(0o755)
    return submit.DriverJob(
        name="s", arguments=["model.py", "--trials", "3"], folder=tmp_path, log=tmp_path / "driver.log",
        options={"python": str(tmp_path / "driver")},
    )  # fmt: skip


def runs(folder: Path) -> list[str]:
    return (folder / "runs").read_text().splitlines() if (folder / "runs").exists() else []


@pytest.mark.system
def test_a_run_is_a_batch_job_that_queues_again_while_machines_are_away(cluster: SlurmCluster, job) -> None:
    assert "runs study s" in submit.to_slurm(job)
    until(lambda: bool(runs(job.folder)), 30)
    number = runs(job.folder)[0].split()[0]

    def ran_again() -> bool:
        cluster.call("scontrol", "update", f"JobId={number}", "StartTime=now")  # Slurm lets it wait two minutes
        return len(runs(job.folder)) > 1

    until(ran_again, 30)
    assert runs(job.folder)[0] == runs(job.folder)[1]
    assert runs(job.folder)[0].endswith("-m autotune.cli run model.py --trials 3")


@pytest.mark.system
def test_a_run_in_ray_is_an_actor_that_ends_with_it(job) -> None:
    if why := why_no_ray():
        pytest.skip(why)
    with ray_cluster(1):
        import ray

        assert "runs study s as process" in submit.to_ray(job)
        until(lambda: bool(runs(job.folder)), 30)
        until(lambda: not _is_there(ray), 30)
    assert len(runs(job.folder)) == 1


def _is_there(ray) -> bool:
    try:
        ray.get_actor("autotune-driver-s", "autotune")
    except ValueError:
        return False
    return True


def manifest(job: submit.DriverJob, **options: str):
    whole = {"image": "i:1", "claim": "c", "apply": "no", **options}
    return json.loads(submit.to_kubernetes(submit.DriverJob(**{**vars(job), "options": whole, "ranks": 4})))


def test_a_pod_has_the_gpus_of_the_ranks_shared_memory_and_is_run_again_where_it_was_taken_away(job) -> None:
    found = manifest(job, queue="gpus", cpus_per_rank="2", mem="64Gi", namespace="team")
    spec, pod = found["spec"], found["spec"]["template"]["spec"]
    assert found["metadata"] == {
        "name": "autotune-s", "namespace": "team", "labels": {"kueue.x-k8s.io/queue-name": "gpus"}
    }  # fmt: skip
    assert spec["suspend"] is True and pod["restartPolicy"] == "Never"
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "4", "cpu": "8", "memory": "64Gi"}
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    assert 75 in spec["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]
    assert pod["containers"][0]["command"] == ["autotune", "run", "model.py", "--trials", "3"]
    plain = manifest(job, gpus_per_rank="0")
    assert plain["spec"]["template"]["spec"]["containers"][0]["resources"] == {"limits": {}}
    assert "suspend" not in plain["spec"] and "labels" not in plain["metadata"]


def test_a_manifest_is_what_the_official_client_takes(job) -> None:
    client = pytest.importorskip("kubernetes.client", reason="kubernetes is not installed: pip install kubernetes")
    found = manifest(job, queue="gpus", mem="64Gi")
    api = client.ApiClient()
    read = api.deserialize(json.dumps(found), "V1Job", "application/json")
    assert api.sanitize_for_serialization(read) == found  # no key is unknown to it


@pytest.mark.parametrize(
    ("options", "nodes", "words"),
    [
        ({"image": "i"}, 1, "give --executor-option claim="),
        ({"image": "i", "claim": "c"}, 2, "a pod is one machine"),
        ({"image": "i", "claim": "c", "gpus_per_rank": "two"}, 1, "gpus_per_rank=two: a whole number is needed"),
        ({"image": "i", "claim": "c", "apply": "maybe"}, 1, "apply=maybe: yes or no is needed"),
    ],
)
def test_what_a_pod_cannot_be_is_said(job, options, nodes, words) -> None:
    with pytest.raises(UserError, match=words):
        submit.to_kubernetes(submit.DriverJob(**{**vars(job), "options": options, "nodes": nodes}))


def test_a_run_in_a_pod_is_local_and_other_engines_are_told_what_submit_was() -> None:
    given = ["m.py", "--executor", "kubernetes", "--executor-option=image=i", "--trials", "3", "--", "--executor", "x"]
    assert run_arguments(given, "kubernetes") == ["m.py", "--trials", "3", "--", "--executor", "x"]
    assert run_arguments(["m.py", "--executor", "ray"], "ray") == ["m.py", "--executor", "ray"]


def test_an_allocation_that_is_too_small_says_how_to_get_another(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    with pytest.raises(Refused, match="job 7, inside of which this runs, has 1; --executor-option allocation=new"):
        Steps({}, 1, "x").launch(Spool(tmp_path), 2)
