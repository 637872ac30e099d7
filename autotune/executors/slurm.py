"""The engine for Slurm: one batch job holds the machines, and its agents run the trials."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from autotune.errors import Unavailable, UserError
from autotune.executors.base import Status
from autotune.executors.cluster import Engine, JobState, Refused
from autotune.executors.node_agent import Spool
from autotune.executors.options import is_usual, whole
from autotune.system import files, processes

# Names and descriptions of `--executor-option`.
OPTIONS = {
    "partition": "the partition to run in",
    "account": "the account to charge",
    "qos": "the quality of service",
    "constraint": "features that the nodes must have",
    "reservation": "a reservation to use",
    "nodelist": "these nodes and no others",
    "time": "time limit of the job, as sbatch takes it",
    "gpus_per_rank": "GPUs of a rank (default: 1 where the partition has any)",
    "cpus_per_rank": "processors of a rank (default: whole nodes)",
    "mem": "memory of a node (default: all of it)",
    "exclusive": "yes (default) or no: nodes that nobody else uses meanwhile",
    "hold": "yes (default): one job for the whole study; no: one for each trial",
    "allocation": "auto (default): use the allocation inside of which autotune runs, if any; new: ask for another one",
    "container": "a command that runs what follows it in a container, as `apptainer exec --nv IMAGE`",
    "python": "the interpreter on the nodes (default: this one)",
    "sbatch": "more arguments of sbatch, as they are",
    "idle": "seconds after which a job whose coordinator is gone gives its nodes back (default: 600)",
}
PASSED = ("partition", "account", "qos", "constraint", "reservation", "nodelist", "time")
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
ALIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
# Reasons of a pending job that can never start.
NEVER = re.compile(
    r"Partition(Config|NodeLimit|TimeLimit)|BadConstraints|Invalid(Account|QOS)|(Account|QOS)NotAllowed"
    r"|(QOS|Assoc)(Max|Min).*PerJob.*"
)
# Of a job that Slurm put back into its queue and holds there, since a node failed while it started.
HELD = re.compile(r"launch[_ ]failed[_ ]requeued[_ ]held", re.IGNORECASE)
# What sbatch says where it may accept the same job later.
AT_PRESENT = re.compile(
    r"temporarily|try again|contact slurm|Socket timed out|did not answer|Connection refused|not responding"
    r"|Transport endpoint|Zero Bytes|MaxSubmit|MaxJobs|ReqNodeNotAvail|Requested nodes are busy|in DRAIN",
    re.IGNORECASE,
)
# States of a job that Slurm or a person ended: no configuration causes them.
TAKEN = {
    "TIMEOUT": "its time limit was reached",
    "PREEMPTED": "another job took its place",
    "NODE_FAIL": "a node failed",
    "CANCELLED": "somebody cancelled it",
    "DEADLINE": "its deadline was reached",
    "BOOT_FAIL": "a node did not start",
    "REVOKED": "another cluster took it",
}
WORDS = TAKEN | {
    "OUT_OF_MEMORY": "it went over the job's memory",
    "PartitionConfig": "the partition has fewer nodes, or other ones",
    "PartitionNodeLimit": "the partition gives a job fewer nodes",
    "PartitionTimeLimit": "the partition gives a job less time",
    "BadConstraints": "no node has what was asked for",
}
COMMAND_TIMEOUT_S = 60.0
# The number of GPUs in a GRES of sinfo: `gpu:8`, `gpu:a100:8(S:0-1)`, or `gpu` for one.
GPUS = r"gpu(?::(?!\d+(?:[(,\s]|$))[^:,( ]+)?(?::(\d+))?(?=[(,\s]|$)"
# What srun takes from an allocation for each of its tasks: there is one agent on a node, for the ranks of all its tasks.
FOR_EACH_TASK = (
    "SLURM_GPUS_PER_TASK", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_TRES", "SLURM_GPU_BIND", "SLURM_TRES_BIND",
)  # fmt: skip
# What Slurm says of any step that fails; what failed stands above it.
NO_CAUSE = re.compile(
    r"Exited with exit code|Terminating|Job step aborted|STEP \S+ ON|Waiting up to|Force Terminated|cpu binding"
)


class Slurm(Engine):
    """The engine of `--executor slurm`; it needs Slurm's commands and a file system that the nodes share.

    Args:
        ranks_per_node: Ranks on each node; None for one per GPU.
    """

    name = "slurm"

    def __init__(self, options: dict[str, str], ranks_per_node: int | None, job_name: str) -> None:
        self.options, self.ranks_per_node, self.job_name = options, ranks_per_node, job_name
        self.hold = is_usual(options, "hold")
        self._logs: dict[str, Path] = {}
        self._exclusive = is_usual(options, "exclusive")

    def check(self, nodes: int) -> None:
        """Checks that Slurm answers and knows the partition."""
        for command in ("sbatch", "scontrol", "scancel", "sinfo"):
            if shutil.which(command) is None:
                raise UserError(
                    f"--executor slurm: there is no {command} on this machine; run autotune where jobs are submitted"
                )
        partition = self.options.get("partition")
        done = _call("sinfo", "--noheader", "--format=%P %D", *(["--partition", partition] if partition else []))
        if done.returncode:
            raise Unavailable(f"--executor slurm: Slurm does not answer: {_said(done)}")
        if not done.stdout.strip():
            what = f"no partition {partition!r}" if partition else "no partition that you may use"
            raise UserError(f"--executor slurm: Slurm has {what}; `sinfo` lists them")

    def launch(self, spool: Spool, nodes: int) -> str:
        """Submits the batch job of the agents; returns its number."""
        job = self.submit(self._script(spool), spool.path / "job.log", nodes, "--no-requeue")
        self._logs[job] = spool.path / "job.log"
        return job

    def submit(self, script: str, log: Path, nodes: int, *more: str) -> str:
        """Submits a batch script with what the user's options ask for; returns the job's number."""
        arguments = [
            "--parsable", f"--job-name={self.job_name}", f"--nodes={nodes}", f"--ntasks={nodes}", *more,
            "--ntasks-per-node=1", f"--output={log}", "--open-mode=append",
            *(f"--{name}={self.options[name]}" for name in PASSED if name in self.options),
        ]  # fmt: skip
        if self._exclusive:
            arguments += ["--exclusive", f"--mem={self.options.get('mem', '0')}"]
        elif "mem" in self.options:
            arguments += [f"--mem={self.options['mem']}"]
        if "cpus_per_rank" in self.options:
            arguments += [f"--cpus-per-task={(self.ranks_per_node or 1) * whole(self.options, 'cpus_per_rank')}"]
        if n_gpus := self._gpus_per_node():
            arguments += [f"--gres=gpu:{n_gpus}"]
        arguments += shlex.split(self.options.get("sbatch", ""))
        done = _call("sbatch", *arguments, given=script)
        if done.returncode:
            raise Refused(_said(done), at_present=AT_PRESENT.search(done.stderr) is not None)
        return done.stdout.strip().splitlines()[-1].partition(";")[0]

    def standing(self, job: str) -> JobState:
        """Returns the state of a job; `taken` once the controller has forgotten it."""
        done = _call("scontrol", "show", "job", "--oneliner", job)
        if done.returncode and "Invalid job id" in done.stderr:
            return JobState(Status.TAKEN, f"Slurm no longer knows job {job}")
        if done.returncode:
            # The job may still run; `queued` would say that it certainly does not.
            return JobState(Status.RUNNING, f"Slurm does not answer: {_said(done)}")
        said = dict(re.findall(r"(\w+)=(\S*)", done.stdout))
        found = standing_of(job, said.get("JobState", ""), said.get("Reason", "None"), said.get("ExitCode", ""))
        return self._with_last_words(job, found)

    def end(self, job: str) -> None:
        """Cancels a job."""
        _call("scancel", job)

    def _with_last_words(self, job: str, found: JobState) -> JobState:
        """Returns the state of a job with what its log ends with, if its agents failed."""
        if found.status is not Status.LOST or job not in self._logs:
            return found
        lines = (files.tail(self._logs[job], 4096) or b"").decode(errors="replace").splitlines()
        words = [line.strip() for line in lines if line.strip() and not NO_CAUSE.search(line)]
        return JobState(found.status, f"{found.reason}: {words[-1]}") if words else found

    def _gpus_per_node(self) -> int:
        """Returns the GPUs that a node's ranks need; without a number of ranks, all GPUs of the partition's nodes."""
        partition = self.options.get("partition")
        per_rank = whole(self.options, "gpus_per_rank")
        if not per_rank or (self.ranks_per_node and "gpus_per_rank" in self.options):
            return (self.ranks_per_node or 0) * per_rank
        done = _call("sinfo", "--noheader", "--format=%P %G", *(["--partition", partition] if partition else []))
        # An asterisk marks the default partition.
        lines = [line for line in done.stdout.splitlines() if partition or line.partition(" ")[0].endswith("*")]
        counts = [int(n or 1) for line in lines for n in re.findall(GPUS, line.partition(" ")[2])]
        return (self.ranks_per_node or min(counts)) if counts else 0

    def _script(self, spool: Spool, nodes: str = '"$SLURM_JOB_NUM_NODES"', lines: str = "1,$") -> str:
        """Returns the batch script: it finds the first node's address and starts an agent on every node.

        Args:
            lines: Those of the nodes, in the list of the job's, as sed takes them.
        """
        command = spool.agent(python=self.options.get("python", sys.executable))
        agent = f"{self.options.get('container', '')} {shlex.join(command)}".strip()
        return f"""#!/bin/sh
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n '{lines}p')
first=$(echo "$hosts" | head -n 1)
address=$(scontrol show node --oneliner "$first" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')
unset {" ".join(FOR_EACH_TASK)}
exec srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \\
  --nodelist="$(echo "$hosts" | paste -s -d , -)" \\
  --mpi=none --input=none --overlap {agent} --address "${{address:-$first}}"
"""


class Steps(Slurm):
    """The engine inside an allocation that the user has (`SLURM_JOB_ID`): agents are steps of that job.

    Args:
        slot: Which of the trials at once it runs, counted from 0: each has its own nodes.
    """

    def __init__(self, options: dict[str, str], ranks_per_node: int | None, job_name: str, slot: int = 0) -> None:
        super().__init__(options, ranks_per_node, job_name)
        self.hold, self._job, self._slot = True, os.environ["SLURM_JOB_ID"], slot
        self._steps: dict[str, subprocess.Popen[bytes]] = {}

    def check(self, nodes: int) -> None:
        """Checks that Slurm answers, and that the allocation has nodes for each of the trials at once."""
        super().check(nodes)
        there = int(os.environ.get("SLURM_JOB_NUM_NODES") or 1)
        if (needed := (self._slot + 1) * nodes) > there:
            at_once = f" for {self._slot + 1} trials at once" * bool(self._slot)
            raise UserError(
                f"--executor slurm: {needed} nodes are needed{at_once}, and job {self._job}, inside of which this runs, has {there};"
                " --executor-option allocation=new asks for other ones"
            )

    def launch(self, spool: Spool, nodes: int) -> str:
        """Starts a step on its nodes of the allocation; returns its name."""
        script = self._script(spool, str(nodes), f"{self._slot * nodes + 1},{(self._slot + 1) * nodes}")
        # Its mark has the study's next run end it, if this one is killed: it would train on beside that one, in the same folder.
        marked = os.environ | {processes.MARK: processes.new_mark()}
        with open(spool.path / "job.log", "ab") as log:
            step = subprocess.Popen(
                ["sh", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=marked,
                start_new_session=True,
            )
        name = f"{self._job}-{step.pid}"
        self._steps[name], self._logs[name] = step, spool.path / "job.log"
        return name

    def standing(self, job: str) -> JobState:
        """Returns `running` while the step does; else what became of the whole job, if it is over."""
        step = self._steps.get(job)
        if step is None:
            return JobState(Status.TAKEN, "slurm: the run that started the step is over")
        if step.poll() is None:
            return JobState(Status.RUNNING)
        whole = super().standing(self._job)
        if whole.status is Status.TAKEN:
            return whole
        ended = f"slurm: a step of job {self._job} ended with status {step.returncode}"
        return self._with_last_words(job, JobState(Status.LOST, ended))

    def end(self, job: str) -> None:
        """Ends a step with all its processes."""
        step = self._steps.pop(job, None)
        if step is not None:
            processes.stop(step, COMMAND_TIMEOUT_S)


def standing_of(job: str, state: str, reason: str, code: str) -> JobState:
    """Returns the state of a job from what Slurm says of it: its state, the reason, and its exit code."""
    why = "" if reason in ("None", "") else f": {reason}"
    if state in WAITING:
        if NEVER.fullmatch(reason):
            return JobState(Status.REFUSED, f"slurm: job {job} can never start{why}{_words(reason)}")
        if HELD.fullmatch(reason):
            return JobState(Status.TAKEN, f"slurm: job {job} could not be started on its nodes, and is held{why}")
        return JobState(Status.QUEUED, f"slurm: job {job} is {state.lower()}{why}")
    if state in ALIVE:
        return JobState(Status.RUNNING)
    if state == "COMPLETED":
        return JobState(Status.EXITED, f"slurm: job {job} ended before the trial did")
    words = _words(state) or (f", exit status {code}" if state == "FAILED" else "")
    ended = Status.TAKEN if state in TAKEN else Status.LOST
    return JobState(ended, f"slurm: job {job} ended as {state}{words}{why if state not in WORDS else ''}")


def _words(name: str) -> str:
    return f" ({WORDS[name]})" if name in WORDS else ""


def _call(*command: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, input=given, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"{command[0]} did not answer in {COMMAND_TIMEOUT_S:.0f} s")


def _said(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return re.sub(r"^\w+: (error|fatal): ", "", lines[-1]) if lines else f"exit status {done.returncode}"
