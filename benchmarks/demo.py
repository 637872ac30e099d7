"""Times the example study on a machine with everything installed, and the share of its probe and its checks.

`python benchmarks/demo.py`. Of the trials' seconds, `noise` is the probe of the gradient noise scale, `reference` and
`gate` are the quality gate's, `branch` the branches', `repeat` the finalists' rounds.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, write

STUDY = ROOT / "studies" / "code-gpt"

CHECKS = ("noise", "reference", "gate", "branch")


def seconds(trials: Path) -> dict[str, float]:
    """Seconds of the trials of a study, by what they were for."""
    spent: dict[str, float] = {}
    for path in trials.rglob("exit.json"):
        first, *rest = path.parent.relative_to(trials).parts
        role = (rest[0] if rest else "search") if first.isdigit() else first
        role = role.partition("-")[0]
        spent[role] = spent.get(role, 0.0) + float(json.loads(path.read_text())["wall_s"])
    return spent


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "studies" / "code-gpt"
        folder.mkdir(parents=True)
        for file in ("model.py", "study.yaml"):
            shutil.copyfile(STUDY / file, folder / file)
        command = [str(Path(sys.executable).parent / "autotune"), "run", str(folder / "study.yaml"), "--json"]
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        wall = time.perf_counter() - start
        found = json.loads(done.stdout)
        pick = found["picks"]["recommended"]
        spent = seconds(folder / "trials")
        share = sum(spent.get(role, 0.0) for role in CHECKS) / wall
        figures = {"wall_s": wall, "n_trials": found["study"]["n_trials"], "trials_wall_s": found["study"]["wall_s"]}
        figures |= {"seconds_by_role": spent, "probe_and_checks_share": share, "recommended": pick["candidate"]}
        write("demo", figures | {"speedup": pick["speedup"], "speedup_ci95": pick["speedup_ci95"]})


if __name__ == "__main__":
    main()
