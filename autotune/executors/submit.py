"""The driver as a job: a run of a study, with its trials, inside Slurm, Ray or Kubernetes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import Unavailable, UserError
from autotune.executors.cluster import EXPORTED
from autotune.executors.options import is_yes, whole
from autotune.executors.ray import NAMESPACE, Ray
from autotune.executors.slurm import Slurm

# `--executor-option` of Kubernetes.
OPTIONS = {
    "image": "the container's image, with autotune, torch and DeepSpeed",
    "claim": "the PersistentVolumeClaim that holds this folder, mounted at its path",
    "namespace": "the namespace (default: that of the context)",
    "queue": "a LocalQueue of Kueue, which starts the job",
    "cpus_per_rank": "processors of a rank (default: not asked for)",
    "gpus_per_rank": "GPUs of a rank (default: 1; 0 on machines without)",
    "mem": "memory of the pod, as 64Gi (default: not asked for)",
    "apply": "yes (default): hand it to kubectl; no: print the manifest",
}
TEMPORARY = Unavailable.status
KILLED_AT_MOST = 3  # a driver that is killed more often fills its machine's memory, say, and would be again


@dataclass(frozen=True, kw_only=True)
class DriverJob:
    """A run to be submitted.

    Attributes:
        name: Name of the study.
        arguments: What `autotune run` gets.
        folder: Working directory, on a file system that the machines share.
        log: File for its output.
        options: The user's `--executor-option`.
        nodes: Machines.
        ranks: Ranks of a trial; None for one per GPU.
    """

    name: str
    arguments: Sequence[str]
    folder: Path
    log: Path
    options: Mapping[str, str]
    nodes: int = 1
    ranks: int | None = None

    @property
    def command(self) -> list[str]:
        """The command of the job."""
        return [self.options.get("python", sys.executable), "-m", "autotune.cli", "run", *self.arguments]


def to_slurm(job: DriverJob) -> str:
    """Submits a batch job that runs the driver, whose trials use the job's own nodes; returns what to say of it.

    Machines that stay away (status 75), preemption and a driver that is killed put it back into the queue; the same run
    goes on.

    Raises:
        UserError: sbatch refuses it.
    """
    engine = Slurm(
        {"python": sys.executable, **job.options}, job.ranks and job.ranks // job.nodes, f"autotune-{job.name}"
    )
    engine.check(job.nodes)
    script = f"""#!/bin/sh
cd {shlex.quote(str(job.folder))} || exit
trap 'kill -TERM "$driver" 2>/dev/null' TERM
{shlex.join(job.command)} &
driver=$!
wait "$driver"; s=$?
while kill -0 "$driver" 2>/dev/null; do wait "$driver"; s=$?; done
[ "$s" -eq 137 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {KILLED_AT_MOST} ] && s={TEMPORARY}
[ "$s" -eq {TEMPORARY} ] && scontrol requeue "$SLURM_JOB_ID"
exit "$s"
"""
    number = engine.submit(script, job.log, job.nodes, "--requeue", "--signal=B:TERM@60")
    return f"slurm: job {number} runs study {job.name}; its output: {job.log}; it ends with: scancel {number}"


class Driver:
    """Ray actor that runs the driver; Ray starts it anew on another machine when its own is lost.

    Args:
        name: Its name in Ray.
        command: The command.
        folder: Its working directory.
        log: File for its output.
        variables: The user's variables.
    """

    def __init__(self, name: str, command: Sequence[str], folder: str, log: str, variables: Mapping[str, str]) -> None:
        import threading

        environment = {**os.environ, **variables}
        if "OMP_NUM_THREADS" not in variables:
            environment.pop("OMP_NUM_THREADS", None)  # Ray's
        with open(log, "ab") as file:
            self._process = subprocess.Popen(
                list(command), cwd=folder, env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL
            )
        threading.Thread(target=self._end, args=(name,), daemon=True).start()

    def pid(self) -> int:
        """Returns the PID of the driver."""
        return self._process.pid

    def _end(self, name: str) -> None:
        import ray

        self._process.wait()
        ray.kill(ray.get_actor(name, NAMESPACE), no_restart=True)


def to_ray(job: DriverJob) -> str:
    """Starts a detached actor that runs the driver; returns what to say of it.

    Raises:
        UserError: There is no cluster, or the study's driver runs there already.
    """
    Ray(dict(job.options), None).check(job.nodes)
    import ray

    name = f"autotune-driver-{job.name}"
    exported = {key: value for key, value in os.environ.items() if key.startswith(EXPORTED)}
    options = {
        "name": name, "namespace": NAMESPACE, "lifetime": "detached", "max_restarts": -1, "num_cpus": 0,
        "runtime_env": {"env_vars": {"PYTHONPATH": exported["PYTHONPATH"]} if "PYTHONPATH" in exported else {}},
    }  # fmt: skip
    job.log.parent.mkdir(parents=True, exist_ok=True)
    try:
        actor = ray.remote(Driver).options(**options).remote(name, job.command, str(job.folder), str(job.log), exported)
        pid = ray.get(actor.pid.remote())
    except ValueError as error:
        raise UserError(f"ray: the driver of study {job.name} runs there already ({error})") from None
    return f"ray: actor {name} runs study {job.name} as process {pid}; its output: {job.log}"


def object_name(name: str, most: int = 63) -> str:
    """Returns a name as Kubernetes takes it: small letters, digits and hyphens, cut to its limit."""
    return re.sub(r"[^a-z0-9-]+", "-", name.lower())[:most].strip("-")


def pod(container: Mapping[str, Any], folder: str, claim: str) -> dict[str, Any]:
    """Returns the pod of a container that works in a folder on a PersistentVolumeClaim.

    Args:
        container: Its name, image, command, variables and limits.
        folder: The folder at which the claim is mounted.
        claim: The claim.
    """
    mounts = [{"name": "project", "mountPath": folder}, {"name": "shm", "mountPath": "/dev/shm"}]
    return {
        "restartPolicy": "Never",
        "containers": [{**container, "workingDir": folder, "volumeMounts": mounts}],
        "volumes": [
            {"name": "project", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # ranks and data loaders share memory in it
        ],
    }


def manifest(job: DriverJob) -> dict[str, Any]:
    """Returns the Kubernetes Job of a run: one pod holds the driver and all ranks of its trials.

    A pod that is evicted or preempted, and a run that ends with status 75, are started again without being counted.

    Raises:
        UserError: An option is missing, or the study needs several machines.
    """
    if job.nodes > 1:
        raise UserError("submit --executor kubernetes: a pod is one machine; leave out --nodes, or use slurm or ray")
    missing = [name for name in ("image", "claim") if not job.options.get(name)]
    if missing:
        raise UserError(f"submit --executor kubernetes: give --executor-option {missing[0]}=...: {OPTIONS[missing[0]]}")
    ranks, folder = job.ranks or 1, str(job.folder)
    n_gpus = ranks * whole(job.options, "gpus_per_rank")
    limits = {"nvidia.com/gpu": str(n_gpus)} if n_gpus else {}
    limits |= {"cpu": str(ranks * whole(job.options, "cpus_per_rank"))} if "cpus_per_rank" in job.options else {}
    limits |= {"memory": job.options["mem"]} if "mem" in job.options else {}
    variables = {
        key: os.environ[key] for key in ("OMP_NUM_THREADS", "DS_ACCELERATOR", "AUTOTUNE_CACHE") if key in os.environ
    }
    container = {
        "name": "driver",
        "image": job.options["image"],
        "command": ["autotune", "run", *job.arguments],
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "resources": {"limits": limits},
    }
    queue = {"kueue.x-k8s.io/queue-name": job.options["queue"]} if "queue" in job.options else {}
    again = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"containerName": "driver", "operator": "In", "values": [TEMPORARY, 143]}},
    ]
    meta: dict[str, Any] = {"name": object_name(f"autotune-{job.name}")} | ({"labels": queue} if queue else {})
    meta |= {"namespace": job.options["namespace"]} if "namespace" in job.options else {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": meta,
        "spec": {
            "backoffLimit": 0,
            **({"suspend": True} if queue else {}),  # Kueue starts it
            "podFailurePolicy": {"rules": again},
            "template": {"spec": pod(container, folder, job.options["claim"])},
        },
    }


def to_kubernetes(job: DriverJob) -> str:
    """Hands the Job to kubectl, or returns it to be printed.

    Raises:
        UserError: kubectl is not here, or refuses it.
    """
    text = json.dumps(manifest(job), indent=2)
    if not is_yes(job.options, "apply"):
        return text
    if shutil.which("kubectl") is None:
        raise UserError("submit --executor kubernetes: there is no kubectl here; --executor-option apply=no prints it")
    done = subprocess.run(["kubectl", "apply", "-f", "-"], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise UserError(f"submit --executor kubernetes: kubectl refuses the job: {said}")
    return done.stdout.strip()


ENGINES = {"slurm": to_slurm, "ray": to_ray, "kubernetes": to_kubernetes}
