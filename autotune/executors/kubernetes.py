"""The driver as a job of Kubernetes: a Job of one pod, or a JobSet whose pods are the machines."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autotune.errors import Unavailable, UserError
from autotune.executors import pods
from autotune.executors.driver_job import DriverJob
from autotune.executors.options import is_usual, whole

OPTIONS = {
    "image": "the container's image, with autotune, torch and DeepSpeed",
    "claim": "the PersistentVolumeClaim that holds this folder, mounted at its path; by all pods of several machines",
    "namespace": "the namespace (default: that of the context)",
    "queue": "a LocalQueue of Kueue, which starts the job",
    "cpus_per_rank": "processors of a rank (default: not asked for)",
    "gpus_per_rank": "GPUs of a rank (default: 1; 0 on machines without)",
    "mem": "memory of a machine's pod, as 64Gi (default: not asked for)",
    "python": "the interpreter in the image (default: python)",
    "apply": "yes (default): hand it to kubectl; no: print the manifest",
}
# Variables that change measurements, or where they are kept.
CARRIED = ("OMP_NUM_THREADS", "DS_ACCELERATOR", "AUTOTUNE_CACHE")
# The same of networks and of torch's allocator, by how they begin.
PREFIXES = ("NCCL_", "GLOO_", "UCX_", "FI_", "OFI_", "PYTORCH_")
LONGEST_NAME, LONGEST_OF_A_SET = 63, 40  # a JobSet's name begins those of its pods
DISRUPTED = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
NO_CLUSTER = re.compile(r"connection refused|no such host|unable to connect|i/o timeout|current-context", re.IGNORECASE)
DRIVER, MACHINE = "driver", "machine"
JOBSET_NAME, REPLICATED_JOB = "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/replicatedjob-name"


def object_name(name: str, most: int = LONGEST_NAME) -> str:
    """Returns a name as Kubernetes takes it: small letters, digits and hyphens, cut to its limit."""
    return re.sub(r"[^a-z0-9-]+", "-", name.lower())[:most].strip("-")


def pod(container: Mapping[str, Any], folder: str, claim: str) -> dict[str, Any]:
    """Returns the pod of a container that works in the folder at which a PersistentVolumeClaim is mounted."""
    mounts = [{"name": "project", "mountPath": folder}, {"name": "shm", "mountPath": "/dev/shm"}]
    return {
        "restartPolicy": "Never",
        "shareProcessNamespace": True,  # so that something reaps what ranks leave behind, which has no parent
        "containers": [{**container, "workingDir": folder, "volumeMounts": mounts}],
        "volumes": [
            {"name": "project", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # ranks and data loaders share memory in it
        ],
    }


def manifest(job: DriverJob) -> dict[str, Any]:
    """Returns the manifest of a run: a Job with driver and ranks in one pod, or a JobSet for several machines.

    A pod that is evicted or preempted, and a run that ends with status 75, are started again without being counted.
    """
    missing = [name for name in ("image", "claim") if not job.options.get(name)]
    if missing:
        raise UserError(f"submit --executor kubernetes: give --executor-option {missing[0]}=...: {OPTIONS[missing[0]]}")
    for path in (job.log, *job.files):
        if not path.is_relative_to(job.folder):
            raise UserError(
                f"submit --executor kubernetes: {path} lies outside of {job.folder}, which is what the claim holds;"
                " submit from a folder above both"
            )
    if job.nodes > 1 and job.ranks is None:
        raise UserError("submit --executor kubernetes: give --ranks; the GPUs of each machine's pod follow from it")
    return _job_set(job) if job.nodes > 1 else _job(job)


def _job(job: DriverJob) -> dict[str, Any]:
    """Returns the Job of one pod."""
    container = _driver(job, {}, _limits(job, (job.ranks or 1) * job.at_once))
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(job, object_name(f"autotune-{job.name}")),
        "spec": {**_suspended(job), **_driver_job(job, container)},
    }


def _job_set(job: DriverJob) -> dict[str, Any]:
    """Returns the JobSet of several machines: one pod for the driver, and one for each machine.

    The JobSet is over when the driver is. Its headless service gives the pods names; the pods of machines lie on
    different nodes, and are replaced one by one whatever ended them.
    """
    name = object_name(f"autotune-{job.name}", LONGEST_OF_A_SET)
    variables = {pods.BOARD: str(job.log.parent / "pods"), pods.MACHINES: str(job.nodes)}
    assert job.ranks is not None
    machine = {
        "name": MACHINE,
        "image": job.options["image"],
        "command": [job.options.get("python", "python"), "-m", "autotune.executors.pods", variables[pods.BOARD]],
        "env": [
            *_env(carried() | variables),
            {"name": pods.ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        "resources": {"limits": _limits(job, job.ranks // job.nodes)},
    }
    own = {"matchLabels": {JOBSET_NAME: name, REPLICATED_JOB: MACHINE}}
    apart = {"labelSelector": own, "topologyKey": "kubernetes.io/hostname"}
    machines = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [DISRUPTED, _ignored(MACHINE, "NotIn", [0])]},
        "template": {
            "spec": _pod_of(job, machine)
            | {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}}
        },
    }
    driver = _driver_job(job, _driver(job, variables, {}))
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job, name),
        "spec": {
            **_suspended(job),
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [DRIVER]},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [
                {"name": DRIVER, "replicas": 1, "template": {"spec": driver}},
                {"name": MACHINE, "replicas": 1, "template": {"spec": machines}},
            ],
        },
    }


def _driver(job: DriverJob, variables: Mapping[str, str], limits: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": DRIVER,
        "image": job.options["image"],
        "command": replace(job, options={"python": "python", **job.options}).command,  # the image's, not this one
        "env": _env({**carried(), **variables}),
        "resources": {"limits": dict(limits)},
    }


def _driver_job(job: DriverJob, container: Mapping[str, Any]) -> dict[str, Any]:
    again = [DISRUPTED, _ignored(DRIVER, "In", [Unavailable.status, 143])]
    return {"backoffLimit": 0, "podFailurePolicy": {"rules": again}, "template": {"spec": _pod_of(job, container)}}


def _pod_of(job: DriverJob, container: Mapping[str, Any]) -> dict[str, Any]:
    return pod(container, str(job.folder), job.options["claim"])


def _ignored(container: str, operator: str, statuses: list[int]) -> dict[str, Any]:
    """Returns the rule that a container which ends with these statuses is started again uncounted."""
    return {"action": "Ignore", "onExitCodes": {"containerName": container, "operator": operator, "values": statuses}}


def _limits(job: DriverJob, ranks: int) -> dict[str, str]:
    """Returns the resources of a pod with `ranks` ranks."""
    n_gpus = ranks * whole(job.options, "gpus_per_rank")
    limits = {"nvidia.com/gpu": str(n_gpus)} if n_gpus else {}
    limits |= {"cpu": str(ranks * whole(job.options, "cpus_per_rank"))} if "cpus_per_rank" in job.options else {}
    return limits | ({"memory": job.options["mem"]} if "mem" in job.options else {})


def _metadata(job: DriverJob, name: str) -> dict[str, Any]:
    labels = {"kueue.x-k8s.io/queue-name": job.options["queue"]} if "queue" in job.options else {}
    meta: dict[str, Any] = {"name": name} | ({"labels": labels} if labels else {})
    return meta | ({"namespace": job.options["namespace"]} if "namespace" in job.options else {})


def _suspended(job: DriverJob) -> dict[str, Any]:
    return {"suspend": True} if "queue" in job.options else {}  # Kueue starts it


def carried() -> dict[str, str]:
    """Returns the variables of this environment that change measurements, or where they are kept."""
    return {name: value for name, value in os.environ.items() if name in CARRIED or name.startswith(PREFIXES)}


def _env(variables: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in variables.items()]


def to_kubernetes(job: DriverJob) -> str:
    """Hands the manifest to kubectl, or returns it to be printed."""
    made = manifest(job)
    text = json.dumps(made, indent=2)
    if not is_usual(job.options, "apply"):
        return text
    if shutil.which("kubectl") is None:
        raise UserError("submit --executor kubernetes: there is no kubectl here; --executor-option apply=no prints it")
    # Not `apply`, which leaves a job that is over as it is, and cannot change one.
    done = subprocess.run(["kubectl", "create", "-f", "-"], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        if NO_CLUSTER.search(said):
            raise Unavailable(f"submit --executor kubernetes: kubectl reaches no cluster: {said[:300]}")
        hint = "; the cluster's administrator installs JobSet" if "JobSet" in said else ""
        if "already exists" in said:
            where = f" -n {job.options['namespace']}" if "namespace" in job.options else ""
            remove = f"kubectl delete {made['kind'].lower()} {made['metadata']['name']}{where}"
            hint = f". If that run is over, submit again after `{remove}`: the study goes on where it was"
        raise UserError(f"submit --executor kubernetes: kubectl refuses the job: {said}{hint}")
    return done.stdout.strip()
