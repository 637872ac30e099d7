"""What becomes of a trial when Slurm takes its nodes away; a stand-in of the agent takes the orders."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clusters import SlurmCluster, until
from support.paths import MODELS, ROOT

from autotune.errors import UserError
from autotune.executors import base, slurm
from autotune.executors.base import Status
from autotune.executors.cluster import ClusterExecutor, JobState, Refused, Spool, settings_for
from autotune.executors.slurm import Slurm, standing_of
from autotune.system import processes
from autotune.trial.folder import TrialDir, write_record
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome

STAND_IN = ROOT / "tests" / "support" / "stand_in_agent.py"
REQUEST = TrialRequest(target=str(MODELS / "ok.py"), world_size=2, nodes=2, deadline_s=1.0)


class Trials:
    """Submits trials to a cluster, with whatever options."""

    def __init__(self, cluster: SlurmCluster, root: Path) -> None:
        self.cluster, self.root, self.executors = cluster, root, list[ClusterExecutor]()
        self.folder, self.said = TrialDir(root / "0000"), list[str]()

    def executor(self, nodes: int = 2, **options: str) -> ClusterExecutor:
        engine = Slurm({"python": str(STAND_IN), **options}, 1, "autotune-tests")
        settings = settings_for([], {}, 600.0)
        self.executors.append(ClusterExecutor(engine, self.root / "agents", settings, nodes))
        self.executors[-1].on_queue = self.said.append
        return self.executors[-1]

    def submit(self, **options: str) -> base.Job:
        write_record(self.folder.request, REQUEST)
        return self.executor(**options).submit(self.folder)

    def running(self, **options: str) -> base.Job:
        """A trial that both nodes have taken up."""
        job = self.submit(**options)
        until(lambda: {"node-0.json", "node-1.json"} <= self.folder.names() and job.poll() is Status.RUNNING, 30)
        return job

    def why_taken(self, job: base.Job, timeout_s: float = 30.0) -> str:
        """Returns why Slurm took a trial's nodes away."""
        until(lambda: job.poll() is Status.TAKEN, timeout_s)
        assert base.conclude(self.folder, REQUEST, job.reason).outcome is Outcome.LOST
        return job.reason


@pytest.fixture
def trials(cluster: SlurmCluster, tmp_path: Path) -> Iterator[Trials]:
    trials = Trials(cluster, tmp_path)
    yield trials
    for executor in trials.executors:
        executor.close()
    cluster.call("scancel", "--user=root")
    until(lambda: not cluster.jobs() and set(cluster.states()) == {"idle"}, 60)


@pytest.mark.system
def test_a_wait_in_the_queue_is_told_and_is_not_the_trials_time(trials: Trials) -> None:
    trials.cluster.call("sbatch", "--exclusive", "--nodes=1", "--output=/dev/null", "--wrap=sleep 600")
    until(lambda: bool(trials.cluster.jobs()), 10)
    job = trials.submit()
    until(lambda: job.poll() is Status.QUEUED and "pending: Resources" in job.reason, 20)
    until(lambda: job.poll() is Status.QUEUED and trials.said[-1:] == [job.reason], 10)
    trials.cluster.call("scancel", "--state=RUNNING", "--user=root")
    until(lambda: job.poll() is Status.RUNNING, 30)


@pytest.mark.system
def test_a_cancelled_wait_leaves_no_job(trials: Trials) -> None:
    trials.cluster.call("sbatch", "--exclusive", "--nodes=2", "--output=/dev/null", "--wrap=sleep 600")
    job = trials.submit(hold="no")
    until(lambda: job.poll() is Status.QUEUED, 10)
    job.cancel()
    until(lambda: len(trials.cluster.jobs()) == 1, 10)  # the other one


@pytest.mark.system
def test_a_trial_whose_nodes_go_to_a_more_urgent_job_is_lost_to_it(trials: Trials) -> None:
    job = trials.running()
    trials.cluster.call("sbatch", "--partition=urgent", "--exclusive", "--nodes=2", "--output=/dev/null", "--wrap=true")
    assert "ended as PREEMPTED (another job took its place)" in trials.why_taken(job)


@pytest.mark.system
def test_a_job_that_somebody_cancels_is_lost_and_the_next_trial_gets_another(trials: Trials) -> None:
    job = trials.running()
    trials.cluster.call("scancel", "--user=root")
    assert "ended as CANCELLED (somebody cancelled it)" in trials.why_taken(job)
    (executor,) = trials.executors
    until(lambda: set(trials.cluster.states()) == {"idle"}, 30)
    trials.folder = TrialDir(trials.root / "0001")
    write_record(trials.folder.request, REQUEST)
    again = executor.submit(trials.folder)
    until(lambda: again.poll() is Status.RUNNING, 30)


@pytest.mark.system
def test_a_trial_on_a_node_whose_daemon_dies_is_lost(trials: Trials) -> None:
    job = trials.running()
    trials.cluster.nodes["n2"].send_signal(signal.SIGKILL)
    try:
        assert "ended as NODE_FAIL (a node failed)" in trials.why_taken(job, 90)
    finally:
        trials.cluster.nodes["n2"].wait()
        trials.cluster.start_node("n2")
        trials.cluster.call("scontrol", "update", "nodename=n2", "state=resume")


@pytest.mark.system
@pytest.mark.parametrize(
    ("nodes", "options", "words"),
    [
        (2, {"partition": "single"}, r"can never start: Partition(NodeLimit|Config) \(the partition"),
        (5, {}, r"^slurm: (.*can never start: PartitionConfig \(the partition has fewer nodes|.*[Nn]ode)"),
    ],
)
def test_what_no_node_can_take_is_refused_in_slurms_words(
    trials: Trials, nodes: int, options: dict[str, str], words: str
) -> None:
    request = TrialRequest(target=REQUEST.target, world_size=nodes, nodes=nodes)
    with pytest.raises(UserError, match=words):
        base.run(trials.executor(nodes, **options), trials.folder.path, request)


@pytest.mark.system
def test_an_unknown_partition_is_refused_before_anything_runs(trials: Trials) -> None:
    with pytest.raises(UserError, match=r"no partition 'nowhere'"):
        trials.executor(partition="nowhere").start()


@pytest.mark.system
def test_held_nodes_of_a_dead_run_are_taken_over(trials: Trials) -> None:
    trials.running()
    (first,) = trials.executors
    (path,) = first.root.glob("*/allocation.json")
    said = path.read_text()
    second = trials.executor()
    second.start()
    assert second._held == []  # its owner, this very process, is alive
    path.write_text(said.replace(f"|{processes.started(os.getpid())}|", "|1|"))
    second.start()  # the number is used again, the process is another one
    assert [held.job for held in second._held] == [held.job for held in first._held]


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands that only write down what they are given."""
    folder, kept = tmp_path / "bin", tmp_path / "kept"
    folder.mkdir()
    (folder / "sbatch").write_text(f'#!/bin/sh\necho "$@" > {kept}; cat >> {kept}; echo "7;cluster"\n')
    (folder / "sinfo").write_text(
        '#!/bin/sh\ncase "$*" in *gpu*) echo "gpu gpu:a100:4(S:0-1)";; *) echo "cpu* (null)"; esac\n'
    )
    for path in folder.iterdir():
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return kept


def submitted(kept: Path, tmp_path: Path, ranks_per_node: int | None, **options: Any) -> str:
    spool = Spool(tmp_path / "spool")
    spool.path.mkdir()
    assert Slurm(options, ranks_per_node, "autotune-x").launch(spool, 2) == "7"
    return kept.read_text()


@pytest.mark.process
@pytest.mark.parametrize(
    ("gres", "n"),
    [
        ("gpu:8", 8),
        ("gpu:4(S:0,2)", 4),
        ("gpu:8,nvme:1", 8),
        ("gpu:a100:8", 8),
        ("gpu:a100:4(S:0-1)", 4),
        ("gpu", 1),
        ("(null)", 0),
    ],
)
def test_all_gpus_of_a_node_are_asked_for(sbatch: Path, gres: str, n: int) -> None:
    """One without a type was read as a type, and one GPU a node was used."""
    (sbatch.parent / "bin" / "sinfo").write_text(f'#!/bin/sh\necho "gpu* {gres}"\n')
    assert Slurm({}, None, "x")._gpus_per_node() == n
    assert Slurm({"gpus_per_rank": "0"}, None, "x")._gpus_per_node() == 0  # all of them were asked for


@pytest.mark.process
def test_what_the_user_asks_for_goes_to_sbatch(sbatch: Path, tmp_path: Path) -> None:
    text = submitted(
        sbatch, tmp_path, 2, partition="gpu", account="a", qos="q", constraint="c&d", time="2:00:00", cpus_per_rank="4",
        container="apptainer exec --nv image.sif", python="/opt/python", sbatch="--comment='two words'",
    )  # fmt: skip
    wanted = "--partition=gpu --account=a --qos=q --constraint=c&d --time=2:00:00 --nodes=2 --ntasks-per-node=1 --cpus-per-task=8"
    assert [
        part
        for part in (*wanted.split(), "--gres=gpu:2", "--exclusive --mem=0", "--comment=two words")
        if part not in text
    ] == []
    assert "apptainer exec --nv image.sif /opt/python -m autotune.executors.node_agent" in text


@pytest.mark.process
def test_without_a_number_of_ranks_all_gpus_of_a_node_are_taken_where_there_are_any(
    sbatch: Path, tmp_path: Path
) -> None:
    assert "--gres=gpu:4" in submitted(sbatch, tmp_path, None, partition="gpu")
    (tmp_path / "spool").rmdir()
    text = submitted(sbatch, tmp_path, None, exclusive="no", hold="no")
    assert "--gres" not in text and "--exclusive" not in text


@pytest.mark.process
def test_a_refusal_of_sbatch_is_quoted(sbatch: Path, tmp_path: Path) -> None:
    (tmp_path / "bin" / "sbatch").write_text(
        "#!/bin/sh\necho 'sbatch: error: Batch job submission failed: Invalid account' >&2\nexit 1\n"
    )
    with pytest.raises(Refused, match=r"^Batch job submission failed: Invalid account$"):
        submitted(sbatch, tmp_path, 1)


@pytest.mark.parametrize(
    ("state", "reason", "status", "words"),
    [
        ("PENDING", "Priority", Status.QUEUED, "slurm: job 7 is pending: Priority"),
        (
            "PENDING",
            "launch_failed_requeued_held",
            Status.TAKEN,
            "slurm: job 7 could not be started on its nodes, and is held: launch_failed_requeued_held",
        ),
        ("PENDING", "JobHeldUser", Status.QUEUED, "slurm: job 7 is pending: JobHeldUser"),
        ("PENDING", "AssocMaxNodePerJobLimit", Status.REFUSED, "slurm: job 7 can never start: AssocMaxNodePerJobLimit"),
        ("TIMEOUT", "TimeLimit", Status.TAKEN, "slurm: job 7 ended as TIMEOUT (its time limit was reached)"),
        ("PREEMPTED", "None", Status.TAKEN, "slurm: job 7 ended as PREEMPTED (another job took its place)"),
        ("NODE_FAIL", "None", Status.TAKEN, "slurm: job 7 ended as NODE_FAIL (a node failed)"),
        ("CANCELLED", "None", Status.TAKEN, "slurm: job 7 ended as CANCELLED (somebody cancelled it)"),
        ("OUT_OF_MEMORY", "None", Status.LOST, "slurm: job 7 ended as OUT_OF_MEMORY (it went over the job's memory)"),
        ("FAILED", "NonZeroExitCode", Status.LOST, "slurm: job 7 ended as FAILED, exit status 1:0: NonZeroExitCode"),
        ("COMPLETED", "None", Status.EXITED, "slurm: job 7 ended before the trial did"),
        ("RUNNING", "None", Status.RUNNING, ""),
    ],
)
def test_every_state_of_a_job_means_something(state: str, reason: str, status: Status, words: str) -> None:
    standing = standing_of("7", state, reason, "1:0")
    assert (standing.status, standing.reason) == (status, words)


@pytest.mark.parametrize(
    ("said", "status"),
    [("slurm_load_jobs error: Invalid job id specified", Status.TAKEN), ("Unable to contact slurm", Status.RUNNING)],
)
def test_a_job_is_gone_where_slurm_has_forgotten_it_and_not_where_it_does_not_answer(monkeypatch, said, status) -> None:
    monkeypatch.setattr(slurm, "_call", lambda *_: subprocess.CompletedProcess((), 1, "", said))
    assert Slurm({}, 1, "x").standing("7").status is status


NO_PYTHON = "slurmstepd-n1: error: execve(): /no/python: No such file or directory"
NO_CAUSE = "srun: error: n1: task 0: Exited with exit code 2\nsrun: launch/slurm: _step_signal: Terminating StepId=4.0"


@pytest.mark.parametrize("log", [f"{NO_PYTHON}\n{NO_CAUSE}\n", f"{NO_CAUSE}\n{NO_PYTHON}\n"])
def test_agents_that_failed_are_told_with_what_slurm_said_of_the_cause(tmp_path, log: str) -> None:
    engine = Slurm({}, 1, "x")
    engine._logs["7"] = tmp_path / "job.log"
    lost, taken = JobState(Status.LOST, "job 7 ended"), JobState(Status.TAKEN, "job 7 ended")
    assert engine._with_last_words("7", lost) == lost  # it wrote nothing
    engine._logs["7"].write_text(log)
    assert engine._with_last_words("7", lost).reason == f"job 7 ended: {NO_PYTHON}"
    assert engine._with_last_words("7", taken) == taken and engine._with_last_words("8", lost) == lost


@pytest.mark.parametrize("options", [{"hold": "maybe"}, {"exclusive": "true"}])
def test_an_option_of_another_kind_is_refused(options: dict[str, str]) -> None:
    with pytest.raises(UserError, match="yes or no is needed"):
        Slurm(options, 1, "x")
