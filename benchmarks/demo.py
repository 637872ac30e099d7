"""How long the example study takes once everything is installed, and how many trials it tunes: `python benchmarks/demo.py`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import write

STUDY = Path(__file__).parent.parent / "studies" / "code-gpt"


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
        write(
            "demo",
            {
                "wall_s": wall,
                "n_trials": found["study"]["n_trials"],
                "trials_wall_s": found["study"]["wall_s"],
                "recommended": pick["candidate"],
                "speedup": pick["speedup"],
                "speedup_ci95": pick["speedup_ci95"],
            },
        )


if __name__ == "__main__":
    main()
