"""The driver as a job: the same run inside Slurm, Ray or Kubernetes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from support import instant
from support.clusters import SlurmCluster, ray_cluster, until, why_no_ray
from typer.testing import CliRunner

from autotune import session
from autotune.cli.app import app
from autotune.cli.run import run_arguments
from autotune.errors import UserError
from autotune.executors import kubernetes, submit
from autotune.executors.cluster import Refused
from autotune.executors.driver_job import SUBMISSION, DriverJob
from autotune.executors.node_agent import Spool
from autotune.executors.slurm import Slurm, Steps
from autotune.study.lock import study_lock
from autotune.study.storage import database, records
from autotune.system import processes

# In place of the interpreter: notes where it runs, ends with status 75 the first time and with 0 the second.
DRIVER = """#!/bin/sh
echo "$SLURM_JOB_ID $*" >> runs
[ "$(wc -l < runs)" -gt 1 ] || exit 75
"""


@pytest.fixture
def job(tmp_path: Path) -> DriverJob:
    (tmp_path / "driver").write_text(DRIVER)
    (tmp_path / "driver").chmod(0o755)
    return DriverJob(
        name="s", arguments=["model.py", "--trials", "3"], folder=tmp_path, log=tmp_path / "driver.log",
        options={"python": str(tmp_path / "driver")},
    )  # fmt: skip


def runs(folder: Path) -> list[str]:
    return (folder / "runs").read_text().splitlines() if (folder / "runs").exists() else []


def test_what_is_to_be_forgotten_is_forgotten_once_for_a_submission(job, tmp_path, monkeypatch) -> None:
    """Slurm, Ray and Kubernetes start a run anew with the same command: each time it lost all its trials."""
    assert not any(word.startswith(SUBMISSION) for word in job.command)
    first, second = (replace(job, arguments=["m.py", "--fresh"], id=name).command for name in ("a", "b"))
    assert first[:2] == ["env", f"{SUBMISSION}=a"] and first[2:] == second[2:] and first != second
    url = records.default_url(tmp_path)
    left = []
    for submission in ("a", "a", "b", ""):
        runner = instant.runner_of(tmp_path, instant.Instant(), trials=1, finalists=0)
        runner.run()
        monkeypatch.setenv(SUBMISSION, submission)
        session._forget("s", database.open_storage(url), tmp_path / "s", instant.Instant())
        left.append("s" in records.study_names(database.open_storage(url)))
    assert left == [False, True, False, False]


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
    assert runs(job.folder)[0].endswith("-m autotune run model.py --trials 3")


@pytest.mark.system
def test_a_run_in_ray_is_an_actor_that_ends_with_it(job) -> None:
    if why := why_no_ray():
        pytest.skip(why)
    with ray_cluster(1):
        import ray

        assert re.search(
            r"actor autotune-driver-s (runs study s as process \d+|has run study s, which has ended);",
            submit.to_ray(job),
        )
        until(lambda: bool(runs(job.folder)), 30)
        until(lambda: not _is_there(ray), 30)
    assert len(runs(job.folder)) == 1


def _is_there(ray) -> bool:
    try:
        ray.get_actor("autotune-driver-s", "autotune")
    except ValueError:
        return False
    return True


def manifest(job: DriverJob, nodes: int = 1, **options: str):
    whole = {"image": "i:1", "claim": "c", "apply": "no", **options}
    folder = job.folder / "studies" / "s"
    changed = {"options": whole, "ranks": 4, "nodes": nodes, "log": folder / "driver.log"}
    return json.loads(submit.to_kubernetes(DriverJob(**{**vars(job), **changed})))


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
    assert pod["containers"][0]["command"] == [
        "python", "-m", "autotune", "run", "model.py", "--trials", "3"
    ]  # fmt: skip
    plain = manifest(job, gpus_per_rank="0")
    assert plain["spec"]["template"]["spec"]["containers"][0]["resources"] == {"limits": {}}
    assert "suspend" not in plain["spec"] and "labels" not in plain["metadata"]


def test_pods_get_what_is_set_of_networks_and_of_the_allocator_and_no_token(job, monkeypatch) -> None:
    own = {"NCCL_IB_HCA": "mlx5", "FI_PROVIDER": "efa", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    for name, value in {**own, "HF_TOKEN": "secret"}.items():
        monkeypatch.setenv(name, value)
    for each in manifest(job, nodes=2)["spec"]["replicatedJobs"]:
        (container,) = each["template"]["spec"]["template"]["spec"]["containers"]
        found = {each["name"]: each.get("value") for each in container["env"]}
        assert own.items() <= found.items() and "HF_TOKEN" not in found


def test_a_pod_that_begins_afresh_runs_the_images_python(job) -> None:
    begun = replace(job, arguments=[*job.arguments, "--fresh"])
    (container,) = manifest(begun)["spec"]["template"]["spec"]["containers"]
    env, once, *command = container["command"]
    assert (env, once) == ("env", f"{SUBMISSION}={begun.id}")
    assert command == ["python", "-m", "autotune", "run", "model.py", "--trials", "3", "--fresh"]


def test_several_machines_are_a_job_set_whose_driver_calls_their_pods(job) -> None:
    found = manifest(job, nodes=2, queue="gpus", mem="64Gi", python="/env/bin/python")
    driver, machines = (each["template"]["spec"] for each in found["spec"]["replicatedJobs"])
    (first,), (second,) = (each["template"]["spec"]["containers"] for each in (driver, machines))
    assert found["kind"] == "JobSet" and found["spec"]["suspend"] is True
    assert found["spec"]["successPolicy"]["targetReplicatedJobs"] == ["driver"]  # machines wait for ever
    assert found["spec"]["network"]["enableDNSHostnames"] is True
    assert (machines["completions"], machines["parallelism"], machines["completionMode"]) == (2, 2, "Indexed")
    assert second["resources"]["limits"] == {"nvidia.com/gpu": "2", "memory": "64Gi"}  # of four ranks on two machines
    assert first["resources"]["limits"] == {} and first["command"][:4] == ["/env/bin/python", "-m", "autotune", "run"]
    board = str(job.folder / "studies" / "s" / "pods")
    assert second["command"] == ["/env/bin/python", "-m", "autotune.executors.pods", board]
    variables = {each["name"]: each.get("value") for each in first["env"]}
    assert (variables["AUTOTUNE_PODS"], variables["AUTOTUNE_MACHINES"]) == (board, "2")
    (apart,) = machines["template"]["spec"]["affinity"]["podAntiAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert apart["labelSelector"]["matchLabels"]["jobset.sigs.k8s.io/jobset-name"] == found["metadata"]["name"]
    assert all({"name": "shm", "emptyDir": {"medium": "Memory"}} in each["template"]["spec"]["volumes"]
               for each in (driver, machines))  # fmt: skip


@pytest.mark.parametrize(("nodes", "model"), [(1, "IoK8sApiBatchV1Job"), (2, "JobsetV1alpha2JobSet")])
def test_a_manifest_is_what_the_published_models_take(job, nodes, model) -> None:
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed: pip install -e '.[dev]'"
    )
    found = manifest(job, nodes, queue="gpus", mem="64Gi", namespace="team", cpus_per_rank="2")
    read = getattr(models, model).from_dict(found).to_dict()
    assert json.loads(json.dumps(read, default=str)) == found  # no key is unknown to it


@pytest.mark.parametrize(
    ("options", "changed", "words"),
    [
        ({"image": "i"}, {}, "give --executor-option claim="),
        ({"image": "i", "claim": "c"}, {"nodes": 2}, "give --ranks"),
        ({"image": "i", "claim": "c"}, {"files": [Path("/elsewhere/model.py")]}, "/elsewhere/model.py lies outside of"),
        ({"image": "i", "claim": "c", "gpus_per_rank": "two"}, {}, "gpus_per_rank=two: a whole number is needed"),
        ({"image": "i", "claim": "c", "apply": "maybe"}, {}, "apply=maybe: yes or no is needed"),
    ],
)
def test_what_a_pod_cannot_be_is_said(job, options, changed, words) -> None:
    with pytest.raises(UserError, match=words):
        submit.to_kubernetes(DriverJob(**{**vars(job), "options": options, **changed}))


def test_the_command_submits_with_its_options(tmp_path, models, monkeypatch) -> None:
    (tmp_path / "model.py").write_bytes((models / "ok.py").read_bytes())
    monkeypatch.chdir(tmp_path)
    given = ["model.py", "--study", "s", "--nodes", "2", "--ranks", "4", "--executor", "kubernetes"]
    own = ["--executor-option", "image=i", "--executor-option", "claim=c", "--executor-option", "apply=no"]
    monkeypatch.setattr("sys.argv", ["autotune", "submit", *given, *own])
    done = CliRunner().invoke(app, ["submit", *given, *own], catch_exceptions=False)
    driver, machines = (each["template"]["spec"] for each in json.loads(done.stdout)["spec"]["replicatedJobs"])
    ((first,), (second,)) = (each["template"]["spec"]["containers"] for each in (driver, machines))
    assert first["command"][3:] == ["run", "model.py", "--study", "s", "--nodes", "2", "--ranks", "4"]
    assert second["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    # The pod of trials side by side had the GPUs of one, and the run in it ended at once.
    for more, n_gpus in ((["--parallel", "2"], "4"), (["--parallel", "2", "--overlap"], "8")):
        done = CliRunner().invoke(app, ["submit", *given[:3], *given[5:], *own, *more], catch_exceptions=False)
        (container,) = json.loads(done.stdout)["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": n_gpus}
    done = CliRunner().invoke(app, ["submit", *given, *own, "--executor-option", "imag=i"])
    assert "imag: unknown to kubernetes. Did you mean 'image'?" in str(done.exception)


@pytest.mark.parametrize(
    ("said", "words", "status"),
    [
        ('Get "http://localhost:8080/api": dial tcp 127.0.0.1:8080: connect: connection refused', "no cluster", 75),
        (
            'error: no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"',
            "administrator installs JobSet",
            2,
        ),
        (
            'Error from server (AlreadyExists): error when creating "STDIN": jobs.batch "autotune-s" already exists',
            r"already exists\. If that run is over, submit again after `kubectl delete job autotune-s -n ours`: the study goes on",
            2,
        ),
    ],
)
def test_what_kubectl_says_is_told(job, monkeypatch, said, words, status) -> None:
    def kubectl(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert (
            command[1] == "create"
        )  # `apply` does nothing where the same run was submitted before, and says no more than that
        return subprocess.CompletedProcess("kubectl", 1, "", f"{said}\n")

    monkeypatch.setattr(kubernetes.shutil, "which", lambda _: "kubectl")
    monkeypatch.setattr(kubernetes.subprocess, "run", kubectl)
    with pytest.raises(UserError, match=words) as refused:
        submit.to_kubernetes(replace(job, options={"image": "i", "claim": "c", "namespace": "ours"}))
    assert refused.value.status == status


def test_a_run_in_a_pod_is_local_and_other_engines_are_told_what_submit_was() -> None:
    given = ["m.py", "--executor", "kubernetes", "--executor-option=image=i", "--trials", "3", "--", "--executor", "x"]
    assert run_arguments(given, "kubernetes") == ["m.py", "--trials", "3", "--", "--executor", "x"]
    assert run_arguments(["m.py", "--executor", "ray"], "ray") == ["m.py", "--executor", "ray"]


def test_an_allocation_that_is_too_small_says_how_to_get_another(monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    monkeypatch.setattr(Slurm, "check", lambda *_: None)
    with pytest.raises(UserError, match=r"2 nodes are needed, and job 7, .* has 1; --executor-option allocation=new"):
        Steps({}, 1, "x").check(2)
    Steps({}, 1, "x").check(1)
    with pytest.raises(UserError, match="2 nodes are needed for 2 trials at once, and job 7"):
        Steps({}, 1, "x", slot=1).check(1)


def test_a_batch_job_has_nodes_for_each_of_the_trials_at_once(job, monkeypatch) -> None:
    """All ran on the nodes of one."""
    asked: list[object] = []
    monkeypatch.setattr(Slurm, "check", lambda _, nodes: asked.append(nodes))
    monkeypatch.setattr(Slurm, "submit", lambda self, *given: asked.append((given[2], self.ranks_per_node)) or "7")
    submit.to_slurm(replace(job, nodes=2, ranks=8, at_once=3))
    assert asked == [6, (6, 4)]


@pytest.mark.parametrize(("at_present", "status"), [(False, 2), (True, 75)])
def test_what_sbatch_refuses_is_said(job, monkeypatch, at_present: bool, status: int) -> None:
    """It was an error of autotune itself."""

    def sbatch(*_: object) -> str:
        raise Refused("Invalid account", at_present=at_present)

    monkeypatch.setattr(Slurm, "check", lambda *_: None)
    monkeypatch.setattr(Slurm, "submit", sbatch)
    with pytest.raises(UserError, match="submit --executor slurm: Invalid account") as refused:
        submit.to_slurm(job)
    assert refused.value.status == status


@pytest.mark.process
def test_a_step_of_a_killed_run_is_ended_by_the_next_one(tmp_path, monkeypatch) -> None:
    """Its agent trained on beside that one's, and wrote its end into the same folder."""
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text("#!/bin/sh\nsleep 60\n" if name == "srun" else "#!/bin/sh\necho n1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setitem(processes._run_marks, os.getpid(), "another-run")  # not of what else these tests have started
    engine = Steps({}, 1, "x")
    step = engine._steps[engine.launch(Spool(tmp_path), 1)]
    (tmp_path / ".lock").write_text(json.dumps({"agent": processes.run_mark()}))  # as a run that is killed leaves it
    with study_lock(tmp_path):
        assert step.wait(10) == -signal.SIGKILL


@pytest.mark.process
def test_what_an_allocation_gives_each_of_its_tasks_does_not_bound_the_one_agent_of_a_node(
    tmp_path, monkeypatch
) -> None:
    for name, text in {
        "srun": 'env > srun.env; echo "$@" > srun.given',
        "scontrol": r"printf 'n1\nn2\nn3\nn4\n'",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    per_task = {"SLURM_GPUS_PER_TASK": "1", "SLURM_TRES_PER_TASK": "cpu:12,gres/gpu:1", "SRUN_CPUS_PER_TASK": "12"}
    for name, value in {**per_task, "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}.items():
        monkeypatch.setenv(name, value)
    engine = Steps({}, 8, "x")
    engine._steps[engine.launch(Spool(tmp_path), 1)].wait(30)
    given = dict(line.partition("=")[::2] for line in (tmp_path / "srun.env").read_text().splitlines())
    assert given["SLURM_JOB_ID"] == "7" and not per_task.keys() & given.keys()
    # Trials at once have nodes of their own; all were on the first ones.
    beside = Steps({}, 8, "x", slot=1)
    beside._steps[beside.launch(Spool(tmp_path), 2)].wait(30)
    srun = (tmp_path / "srun.given").read_text()
    assert "--nodelist=n3,n4 " in srun and srun.endswith("--address n3\n")
