"""What the hooks cost a training script: its own step times with them and without, in the ranks of trials, interleaved.

`python benchmarks/hook_overhead.py [ROUNDS]`: `plain_trial.py` takes its times itself, under torchrun as it is and in the ranks of a
trial. The target is a ratio below 1.02.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from common import plain_trial, write

from autotune.candidate import Candidate
from autotune.executors import base
from autotune.executors.local import LocalExecutor
from autotune.trial import Outcome, Script, TrialDir, TrialRequest

TARGET = Path(__file__).parent.parent / "studies" / "code-gpt" / "model.py"
SCRIPT = Path(__file__).parent / "plain_trial.py"
STEPS, SETTLING, RANKS = 60, 15, 2
CANDIDATES = {
    "ZeRO 1": Candidate(micro_batch_size=8, zero_stage=1),
    # The most calls of the hooks to a second of training: many small micro-batches.
    "ZeRO 2, accumulation 8": Candidate(micro_batch_size=1, gradient_accumulation_steps=8, zero_stage=2),
}


def hooked_trial(executor: LocalExecutor, folder: Path, candidate: Candidate) -> list[float]:
    """The script's own step times in the ranks of a trial, which the engine's end does not cut short."""
    script = Script(
        arguments=(str(TARGET), "{ds_config}", str(STEPS)), working_dir=str(folder), micro_batch_size=candidate.micro_batch_size,
        gradient_accumulation_steps=candidate.gradient_accumulation_steps,
    )  # fmt: skip
    request = TrialRequest(
        target=str(SCRIPT), candidate=candidate.values(), ds_config=candidate.to_deepspeed(), world_size=RANKS, max_steps=10 * STEPS,
        budget_s=1e6, min_samples=10**12, script=script,
    )  # fmt: skip
    result = base.run(executor, folder, request)
    assert result.outcome is Outcome.COMPLETE and result.observed is not None, result.reason
    assert result.observed.mismatch(candidate, RANKS) is None
    log = TrialDir(folder).log(0).read_text()
    line = next(line for line in log.splitlines() if line.startswith("STEPS"))
    times: list[float] = json.loads(line.removeprefix("STEPS "))
    return times


def median_s(times: list[float]) -> float:
    assert len(times) == STEPS
    return statistics.median(times[SETTLING:])


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CANDIDATES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        executor = LocalExecutor(["torch", "deepspeed"], folder / "server.log")
        try:
            for number in range(rounds):
                for n, (label, candidate) in enumerate(CANDIDATES.items()):
                    hooked = median_s(hooked_trial(executor, folder / f"{number}-{n}", candidate))
                    _, times = plain_trial(TARGET, candidate.to_deepspeed(), folder, STEPS, ranks=RANKS)
                    found[label].append((hooked, median_s(times)))
        finally:
            executor.close()
    write(
        "hook_overhead",
        {
            label: {
                "hooked_s": statistics.median(hooked for hooked, _ in pairs),
                "plain_s": statistics.median(plain for _, plain in pairs),
                "ratio": statistics.median(hooked / plain for hooked, plain in pairs),
                "pairs": pairs,
            }
            for label, pairs in found.items()
        },
    )


if __name__ == "__main__":
    main()
