"""The driver as a job: a run of a study, with its trials, inside Slurm or Ray (`kubernetes` for the third engine)."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

from autotune.errors import Unavailable, UserError
from autotune.executors.cluster import EXPORTED, Refused
from autotune.executors.driver_job import DriverJob
from autotune.executors.kubernetes import to_kubernetes
from autotune.executors.ray import NAMESPACE, Ray
from autotune.executors.slurm import Slurm

TEMPORARY = Unavailable.status
KILLED_AT_MOST = 3  # a driver that is killed more often fills its machine's memory, say, and would be again


def to_slurm(job: DriverJob) -> str:
    """Submits a batch job that runs the driver, whose trials use the job's own nodes; returns what to say of it.

    Machines that stay away (status 75), preemption and a driver that is killed put it back into the queue; the same run
    goes on.
    """
    engine = Slurm(
        {"python": sys.executable, **job.options}, job.ranks and job.ranks // job.nodes, f"autotune-{job.name}"
    )
    nodes = job.at_once * job.nodes
    engine.check(nodes)
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
    try:
        number = engine.submit(script, job.log, nodes, "--requeue", "--signal=B:TERM@60")
    except Refused as refusal:
        raise (Unavailable if refusal.at_present else UserError)(f"submit --executor slurm: {refusal}") from None
    return f"slurm: job {number} runs study {job.name}; its output: {job.log}; it ends with: scancel {number}"


class Driver:
    """Ray actor that runs the driver; Ray starts it anew on another machine when its own is lost."""

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
    """Starts a detached actor that runs the driver; returns what to say of it."""
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
    except ray.exceptions.ActorDiedError:  # a driver that ends at once takes its actor along before that answers
        return f"ray: actor {name} has run study {job.name}, which has ended; its output: {job.log}"
    return f"ray: actor {name} runs study {job.name} as process {pid}; its output: {job.log}"


ENGINES = {"slurm": to_slurm, "ray": to_ray, "kubernetes": to_kubernetes}
