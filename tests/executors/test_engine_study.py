"""Whole studies on an engine: the coordinator is killed in the middle, trials run at once."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from support.clusters import ray_cluster, slurm, until, why_no_ray, why_no_slurm
from support.paths import MODELS

from autotune.trial.folder import TrialDir, result_in
from autotune.trial.result import Outcome

pytestmark = pytest.mark.system

STUDY = f"""
target: {MODELS / "noisy.py"}
executor: slurm
executor_options: {{idle: 120}}
nodes: 2
ranks: 2
trials: 2
finalists: 0
trial_budget_s: 3
min_samples: 1000000000
stop_trials: false
sampler: random
space: {{micro_batch_size: {{choices: [4, 8]}}}}
objectives: [throughput]
"""


def test_a_trial_outlives_its_coordinator_and_is_told_once(tmp_path: Path) -> None:
    if why := why_no_slurm():
        pytest.skip(why)
    (tmp_path / "studies" / "s").mkdir(parents=True)
    file = tmp_path / "studies" / "s" / "study.yaml"
    file.write_text(STUDY)
    command = [sys.executable, "-c", "from autotune.cli.app import main; main()"]
    with slurm(tmp_path / "cluster") as cluster, open(tmp_path / "log", "wb") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        first = subprocess.Popen([*command, "run", str(file)], cwd=tmp_path, env=environment, stdout=log, stderr=log)
        folder = TrialDir(tmp_path / "studies" / "s" / "trials" / "0001")
        try:
            until(lambda: first.poll() is not None or '"measure"' in _read(folder.events), 120)
        finally:
            first.kill()
            first.wait()
        said, jobs = json.loads(folder.job.read_text()), cluster.jobs()
        assert len(jobs) == 1 and not folder.result.exists(), (tmp_path / "log").read_text()
        done = subprocess.run(
            [*command, "run", str(file)], cwd=tmp_path, env=environment, stdout=log, stderr=log, check=False
        )
        assert done.returncode == 0, (tmp_path / "log").read_text()
        result = result_in(folder.path)
        assert result is not None and result.outcome is Outcome.COMPLETE
        assert json.loads(folder.job.read_text()) == said
        status = subprocess.run(
            [*command, "status", "s", "--json"], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert json.loads(status.stdout)["outcomes"] == {"complete": 2}
        until(lambda: not cluster.jobs(), 20)


@contextlib.contextmanager
def cluster_of(engine: str, root: Path) -> Iterator[None]:
    if why := why_no_slurm() if engine == "slurm" else why_no_ray():
        pytest.skip(why)
    with slurm(root) if engine == "slurm" else ray_cluster():
        yield


@pytest.mark.parametrize("engine", ["slurm", "ray"])
@pytest.mark.smoke
def test_trials_run_at_once_and_each_is_told_once_and_a_shared_machine_is_said(tmp_path: Path, engine: str) -> None:
    changes = {"executor": engine, "executor_options": {}, "nodes": 1, "ranks": 1, "parallel": 2, "trials": 4}
    changes["space"] = {"micro_batch_size": {"choices": [2, 4, 6, 8]}}
    file = tmp_path / "studies" / "s" / "study.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(yaml.safe_dump(yaml.safe_load(STUDY) | changes))
    command = [sys.executable, "-c", "from autotune.cli.app import main; main()"]
    with cluster_of(engine, tmp_path / "cluster"):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, "run", str(file)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        status = subprocess.run(
            [*command, "status", "s", "--json"], cwd=tmp_path, capture_output=True, text=True, check=True
        )
    assert json.loads(status.stdout)["outcomes"] == {"complete": 4}
    folders = [TrialDir(path) for path in sorted((file.parent / "trials").glob("[0-9]*"))]
    spans = [(folder.request.stat().st_mtime, folder.result.stat().st_mtime) for folder in folders]
    together = [max(a[0], b[0]) < min(a[1], b[1]) for a, b in itertools.combinations(spans, 2)]
    assert len(spans) == 4 and any(together), "no two trials ran at once"
    assert "at the same time" in done.stdout  # the engine's nodes are this one machine


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_submitted_driver_that_is_killed_queues_again_and_goes_on(tmp_path: Path) -> None:
    """Its machines go with it: Slurm starts the job anew, and the trial under way is run again."""
    if why := why_no_slurm():
        pytest.skip(why)
    file = tmp_path / "studies" / "s" / "study.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(yaml.safe_dump(yaml.safe_load(STUDY) | {"trials": 2, "trial_budget_s": 4}))
    command = [sys.executable, "-m", "autotune", "submit", str(file), "--executor", "slurm", "--patience", "5m"]
    with slurm(tmp_path / "cluster") as cluster:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "SLURM_CONF": str(cluster.conf)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        number, log = done.stdout.split("job ")[1].split()[0], file.with_name("driver.log")
        folder = TrialDir(file.parent / "trials" / "0001")
        until(lambda: '"measure"' in _read(folder.events), 200)
        said = ["autotune", "run", str(file), "--patience", "5m"]
        drivers = [each for each in psutil.process_iter(["cmdline"]) if set(said) <= set(each.info["cmdline"] or ())]
        assert len(drivers) == 1, _read(log)
        drivers[0].kill()

        def over() -> bool:
            cluster.call("scontrol", "update", f"JobId={number}", "StartTime=now")  # Slurm lets it wait two minutes
            return not cluster.jobs()

        until(over, 200)
        said = cluster.call("scontrol", "show", "job", "--oneliner", number)
    assert "JobState=COMPLETED" in said and "Restarts=1" in said, _read(log)
    results = [result_in(path) for path in sorted((file.parent / "trials").glob("[0-9]*"))]
    told = [each for each in results if each is not None]
    assert {each.outcome for each in told} == {Outcome.COMPLETE}, _read(log)
    status = [sys.executable, "-m", "autotune", "status", "s", "--json"]
    seen = json.loads(subprocess.run(status, cwd=tmp_path, capture_output=True, text=True, check=True).stdout)
    assert seen["outcomes"] == {"complete": 2} and log.read_text().count("recommended") >= 1
