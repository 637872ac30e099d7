"""A whole study on an engine, whose coordinator is killed in the middle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from clusters import slurm, until, why_no_slurm
from zoo import MODELS

from autotune import trial
from autotune.trial import Outcome, TrialDir

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


@pytest.mark.slow
def test_a_trial_outlives_its_coordinator_and_is_told_once(tmp_path: Path) -> None:
    if why := why_no_slurm():
        pytest.skip(why)
    (tmp_path / "studies" / "s").mkdir(parents=True)
    file = tmp_path / "studies" / "s" / "study.yaml"
    file.write_text(STUDY)
    command = [sys.executable, "-c", "from autotune.cli import main; main()"]
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
        done = subprocess.run([*command, "run", str(file)], cwd=tmp_path, env=environment, stdout=log, stderr=log, check=False)
        assert done.returncode == 0, (tmp_path / "log").read_text()
        result = trial.result_in(folder.path)
        assert result is not None and result.outcome is Outcome.COMPLETE
        assert json.loads(folder.job.read_text()) == said
        status = subprocess.run([*command, "status", "s", "--json"], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert json.loads(status.stdout)["outcomes"] == {"complete": 2}
        until(lambda: not cluster.jobs(), 20)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
