"""Start-up cost of a 2-rank ZeRO-1 trial: our warm server against torchrun of the same trial, interleaved.

Start-up is the wall time of the whole trial without its training steps. `python benchmarks/startup.py [ROUNDS]`.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from common import plain_trial, write

from autotune.candidate import Candidate
from autotune.executors import base
from autotune.executors.local import LocalExecutor
from autotune.trial import Outcome, TrialRequest

TARGET = Path(__file__).parent.parent / "studies" / "code-gpt" / "model.py"
STEPS = 7


def warm(executor: LocalExecutor, folder: Path, candidate: Candidate) -> float:
    request = TrialRequest(
        target=str(TARGET),
        candidate=candidate.values(),
        ds_config=candidate.to_deepspeed(),
        world_size=2,
        max_steps=STEPS,
        budget_s=1e6,
    )
    start = time.perf_counter()
    result = base.run(executor, folder, request)
    wall = time.perf_counter() - start
    assert result.outcome is Outcome.COMPLETE, result.reason
    return wall - sum(result.step_times_s)


def torchrun(folder: Path, candidate: Candidate) -> float:
    wall, times = plain_trial(TARGET, candidate.to_deepspeed(), folder, STEPS)
    return wall - sum(times)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    candidate = Candidate(micro_batch_size=8, zero_stage=1)
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        executor = LocalExecutor(["torch"], folder / "server.log")
        start = time.perf_counter()
        executor.start()
        server_s = time.perf_counter() - start
        try:
            warm(executor, folder / "first", candidate)
            for number in range(rounds):
                ours.append(warm(executor, folder / f"warm-{number}", candidate))
                theirs.append(torchrun(folder, candidate))
        finally:
            executor.close()
    write(
        "startup",
        {
            "warm_s": statistics.median(ours),
            "torchrun_s": statistics.median(theirs),
            "ratio": statistics.median(t / o for t, o in zip(theirs, ours, strict=True)),
            "server_start_s": server_s,
            "rounds": [{"warm_s": o, "torchrun_s": t} for o, t in zip(ours, theirs, strict=True)],
        },
    )


if __name__ == "__main__":
    main()
