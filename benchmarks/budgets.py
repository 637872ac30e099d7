"""Whether time budgets are kept: `python benchmarks/budgets.py [--seconds N] [--only N ...]`, real studies on an idle machine.

20 studies with `--time-budget` of 20 to 90 s: models and scripts of 8 ms to 1 s a step, 1 and 2 ranks, several goals, with
and without `--quick` and what earlier studies left in the cache, so that a budget ends in the baseline, the noise probe,
the search, the checks or the finalists. The wall time is that of the command, from its start to its end. A run that takes
more than 5 % over its budget is a miss; one that ends sooner, since nothing is left to gain, is not.

A run goes on where the last one stopped (`results/budgets.json`); `--only` measures cases again, `--fresh` all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, ran, write

GPT, CNN = ROOT / "studies" / "code-gpt" / "model.py", ROOT / "studies" / "digits-cnn" / "model.py"
CONV, JUDGED = ROOT / "benchmarks" / "truth" / "conv.py", ROOT / "benchmarks" / "judged.py"
WITHIN = 1.05

Case = tuple[
    int, bool, list[str]
]  # the budget in seconds, whether nothing was measured of target and machine before, what is run


def _model(target: Path, ranks: int, *more: str) -> list[str]:
    return [str(target), "--ranks", str(ranks), *more]


def _script(model: str, ranks: int, *more: str) -> list[str]:
    config = ROOT / "studies" / "code-gpt" / "ds_config.json"
    launch = [
        "torchrun",
        "--nproc-per-node",
        str(ranks),
        str(JUDGED),
        model,
        "100000",
        "--deepspeed_config",
        str(config),
    ]
    return [shlex.join(launch), *more]


CASES: tuple[Case, ...] = (
    (20, True, _model(GPT, 2)),
    (30, True, _model(GPT, 1)),
    (45, False, _model(GPT, 2, "--goal", "throughput")),
    (60, False, _model(GPT, 2)),
    (90, False, _model(GPT, 2, "--global-batch", "8..512", "--goal", "balanced")),
    (30, False, _model(GPT, 1, "--quick")),
    (60, False, _model(GPT, 2, "--goal", "memory")),
    (20, True, _model(CONV, 2)),
    (40, False, _model(CONV, 2, "--goal", "latency")),
    (75, False, _model(CONV, 2, "--global-batch", "8..256")),
    (50, False, _model(CONV, 1, "--goal", "time-to-loss")),
    (25, True, _model(CNN, 2)),
    (55, False, _model(CNN, 2, "--goal", "cost")),
    (40, False, _model(CNN, 1, "--quick", "--goal", "throughput")),
    (45, True, _script("perceptron", 2)),
    (60, False, _script("convolutions", 2, "--goal", "throughput")),
    (30, True, _script("decoder", 1)),
    (70, False, _script("decoder", 2)),
    (40, True, _script("large decoder", 1)),
    (90, False, _script("large decoder", 2, "--goal", "throughput")),
)
Row = dict[str, Any]


def measured(number: int, cache: Path) -> Row:
    """Runs a case; its wall time over its budget, and what it said of its end."""
    budget_s, cold, arguments = CASES[number]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {
            **os.environ,
            "AUTOTUNE_CACHE": str(folder / "cache" if cold else cache),
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", "autotune", "run", *arguments, "--time-budget", f"{budget_s}s", "--no-history"]
        start = time.perf_counter()
        status, said = ran(command, 2.0 * budget_s + 60.0, cwd=folder, environment=environment)
        wall_s = time.perf_counter() - start
        row = {"case": number, "budget_s": budget_s, "what": shlex.join(arguments).replace(f"{ROOT}/", "")}
        row |= {"cold": cold, "wall_s": wall_s, "over": wall_s / budget_s - 1, "status": status}
        return row | told(folder, said)


def told(folder: Path, said: str) -> Row:
    """What the study left: its trials by what they were for, the time that it states, and its last words."""
    paths = [path.parent.relative_to(folder) for path in folder.glob("studies/*/trials/**/exit.json")]
    roles = Counter(re.sub(r"[0-9].*", "", part) or "search" for path in paths for part in path.parts[3:][-1:])
    record = next(iter(folder.glob("studies/*/report.json")), None)
    study = json.loads(record.read_text())["study"] if record else {}
    words = [line for line in said.splitlines() if line.startswith(("- ", "autotune: "))]
    return {"ran": dict(roles), "stated_s": study.get("wall_s"), "words": words[-4:], "load": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0, help="start no case that would end after these")
    parser.add_argument("--only", type=int, nargs="*", help="measure these cases, also again")
    parser.add_argument("--fresh", action="store_true")
    asked = parser.parse_args()
    until, cache = time.monotonic() + asked.seconds, Path(tempfile.gettempdir()) / "autotune-budgets"
    file = RESULTS / "budgets.json"
    rows = (
        {row["case"]: row for row in json.loads(file.read_text())["rows"]} if file.exists() and not asked.fresh else {}
    )
    wanted = asked.only if asked.only is not None else [n for n in range(len(CASES)) if n not in rows]
    for number in wanted:
        if time.monotonic() + 1.2 * CASES[number][0] > until:
            continue
        rows[number] = measured(number, cache)
        found = [rows[n] for n in sorted(rows)]
        kept = sum(row["over"] <= WITHIN - 1 for row in found)
        write(
            "budgets",
            {"kept": kept, "cases": len(found), "most_over": max(row["over"] for row in found), "rows": found},
        )


if __name__ == "__main__":
    main()
