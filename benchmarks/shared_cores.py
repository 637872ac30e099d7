"""How far readings of one configuration differ beside other processes: `python benchmarks/shared_cores.py [--readings N]`.

Trials of several models are run again and again while processes come and go that compute on a part of the cores, drawn
anew for each reading. The step time is compared as it was read, and as `autotune.scoring.shared_cores` corrects it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from common import complete, engine, request_of, write
from planted import ADAMW, MODELS

from autotune.scoring.shared_cores import SLOPE
from autotune.space.candidate import Candidate

CASES = ("vision", "many_layers", "heavy_blocks", "wide_table", "slow_loader")  # the last one waits for its data
SECONDS = 1.5  # of timed steps
# A process that computes for a share of each tenth of a second.
BUSY = """
import sys, time
share = float(sys.argv[1])
while True:
    end = time.perf_counter() + 0.1
    while time.perf_counter() < end - 0.1 * (1 - share):
        pass
    time.sleep(max(0.0, end - time.perf_counter()))
"""


@contextlib.contextmanager
def beside(shares: list[float]) -> Iterator[None]:
    """Processes that each compute for a share of the time, in sessions of their own as another user's would be."""
    running = [subprocess.Popen([sys.executable, "-c", BUSY, str(share)], start_new_session=True) for share in shares]
    try:
        yield
    finally:
        for process in running:
            process.send_signal(signal.SIGKILL)
            process.wait()


def readings(model: str, ranks: int, n: int, rng: random.Random) -> list[dict[str, float]]:
    """Step time and slowdown of each trial of one configuration."""
    candidate = Candidate(micro_batch_size=8, gradient_accumulation_steps=1, zero_stage=1)
    n_cores, found = len(os.sched_getaffinity(0)), []
    with engine() as (executor, folder):
        for i in range(n):
            shares = [rng.uniform(0.3, 1.0) for _ in range(rng.randint(0, n_cores))]
            request = request_of(
                MODELS / f"{model}.py",
                candidate,
                world_size=ranks,
                budget_s=SECONDS,
                ds_config=candidate.to_deepspeed() | ADAMW,
            )
            with beside(shares):
                result = complete(executor, folder / str(i), request)
            assert result.steps is not None
            found.append({"step_s": result.steps.median_s, "log_slowdown": result.log_slowdown})
    return found


def spread(found: list[dict[str, float]]) -> dict[str, float]:
    """Standard deviation of the logarithms as read and as corrected, and the slope that fits them best."""
    y = np.log([each["step_s"] for each in found])
    x = np.array([each["log_slowdown"] for each in found])
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred)) if centred.any() else float("nan")
    return {"read_sd": float(y.std(ddof=1)), "corrected_sd": float((y - SLOPE * x).std(ddof=1)), "slope": slope}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readings", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    arguments, rows = parser.parse_args(), list[dict[str, Any]]()
    rng = random.Random(arguments.seed)
    for model in CASES:
        for ranks in (1, 2):
            found = readings(model, ranks, arguments.readings, rng)
            rows.append({"model": model, "ranks": ranks, **spread(found), "readings": found})
            print({k: v for k, v in rows[-1].items() if k != "readings"}, file=sys.stderr, flush=True)
    medians = {name: float(np.median([row[name] for row in rows])) for name in ("read_sd", "corrected_sd", "slope")}
    write("shared_cores", {"cases": len(rows), "each": arguments.readings, **medians, "rows": rows})


if __name__ == "__main__":
    main()
