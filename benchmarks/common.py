"""Shared by all benchmarks: results with their machine and date, a warm engine, trials with and without it."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from autotune.executors import base
from autotune.executors.local import LocalExecutor
from autotune.space.candidate import Candidate
from autotune.system import device
from autotune.system.machine import processor_name
from autotune.system.toolkit import extensions_dir
from autotune.trial.folder import write_record
from autotune.trial.request import TrialRequest
from autotune.trial.result import Outcome, TrialResult

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "tests"))  # what stands in for engines and machines


def write(name: str, figures: dict[str, Any]) -> None:
    """Writes `results/NAME.json` with the machine and the date, and prints it."""
    where = {
        "date": datetime.date.today().isoformat(),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_at_end": os.getloadavg()[0],
        "versions": {package: metadata.version(package) for package in ("torch", "deepspeed", "optuna")},
    }
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({**figures, "measured_on": where}, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n")
    print(text)


@contextlib.contextmanager
def engine(*modules: str) -> Iterator[tuple[LocalExecutor, Path]]:
    """Starts a warm server that has imported some modules; yields it and a folder for trials."""
    with tempfile.TemporaryDirectory() as name:
        executor = LocalExecutor(list(modules), Path(name) / "server.log")
        try:
            executor.start()
            yield executor, Path(name)
        finally:
            executor.close()


def request_of(target: Path, candidate: Candidate, **fields: Any) -> TrialRequest:
    """Returns the request for a trial of a candidate; its steps, not its seconds, end it unless `budget_s` is given."""
    given = {"ds_config": candidate.to_deepspeed(), "budget_s": 1e6} | fields
    return TrialRequest(target=str(target), candidate=candidate.values(), **given)


def complete(executor: base.Executor, folder: Path, request: TrialRequest) -> TrialResult:
    """Runs a trial that has to complete."""
    result = base.run(executor, folder, request)
    assert result.outcome is Outcome.COMPLETE, f"{request.candidate}: {result.outcome}: {result.reason}"
    return result


def plain_environment() -> dict[str, str]:
    """The variables of a training that nobody watches; on a CPU a rank has one thread."""
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(extensions_dir())}
    if device.here().accelerator == "cpu":
        environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return environment


def ran(
    command: list[str], timeout_s: float, *, cwd: Path | None = None, environment: dict[str, str] | None = None
) -> tuple[int | None, str]:
    """Runs a command with everything it starts; returns its status, None where its time was over, and what it said."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
        )  # fmt: skip
        try:
            status: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGINT)  # autotune then ends its ranks and writes what it has
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        return status, said.read()


def plain_trial(
    target: Path, ds_config: dict[str, Any], folder: Path, n_steps: int, *, ranks: int = 2, timeout_s: float = 3600.0
) -> tuple[float, list[float]]:
    """Runs a configuration the ordinary way, torchrun on a hand-written script; returns wall seconds and step times."""
    config = folder / "plain.json"
    write_record(config, ds_config)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(Path(__file__).parent / "plain_trial.py"), str(target), str(config), str(n_steps)]
    start = time.perf_counter()
    status, said = ran(command, timeout_s, environment=plain_environment())
    wall = time.perf_counter() - start
    line = next((line for line in said.splitlines() if line.startswith("STEPS")), None)
    if line is None:
        raise RuntimeError(f"torchrun ended with status {status}: {said[-2000:]}")
    return wall, json.loads(line.removeprefix("STEPS "))
