"""What the benchmarks share: where results go, and what they were measured on."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from autotune.system.machine import extensions_dir, has_cuda_device
from autotune.trial.folder import write_record

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "tests"))  # what stands in for engines and machines


def write(name: str, figures: dict[str, Any]) -> None:
    """Writes `results/NAME.json` with the machine and the date, and prints it."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = names[0].partition(":")[2].strip() if names else platform.machine()
    where = {
        "date": datetime.date.today().isoformat(),
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "load_at_end": os.getloadavg()[0],
        "versions": {package: metadata.version(package) for package in ("torch", "deepspeed", "optuna")},
    }
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({**figures, "measured_on": where}, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n")
    print(text)


def between(text: str, begin: str, end: str, body: str) -> str:
    """A page with something else between two of its lines.

    Raises:
        ValueError: It has no such lines.
    """
    before, first, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last:
        raise ValueError(f"the page has no lines {begin!r} and {end!r}")
    return f"{before}{begin}\n{body}\n{end}{after}"


def plain_environment() -> dict[str, str]:
    """The variables of a training that nobody watches; on a CPU a rank has one thread."""
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(extensions_dir())}
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not has_cuda_device():
        environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return environment


def plain_trial(
    target: Path, ds_config: dict[str, Any], folder: Path, n_steps: int, *, ranks: int = 2
) -> tuple[float, list[float]]:
    """Runs a configuration the ordinary way, torchrun on a hand-written script; returns wall seconds and step times."""
    config = folder / "plain.json"
    write_record(config, ds_config)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(Path(__file__).parent / "plain_trial.py"), str(target), str(config), str(n_steps)]
    start = time.perf_counter()
    done = subprocess.run(command, env=plain_environment(), capture_output=True, text=True, check=False)
    wall = time.perf_counter() - start
    line = next((line for line in done.stdout.splitlines() if line.startswith("STEPS")), None)
    if line is None:
        raise RuntimeError(done.stderr[-2000:])
    return wall, json.loads(line.removeprefix("STEPS "))
