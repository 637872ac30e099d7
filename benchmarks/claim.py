"""Is the step time that a trial claims the one that training has? The same configurations, ours and torchrun, interleaved.

`python benchmarks/claim.py [ROUNDS]`: for three configurations of code-gpt, and one of a model that steps in milliseconds, the ratio of the
step time under a plain torchrun script to the step time that an autotune trial measures.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from common import plain_trial, write

from autotune import stats
from autotune.candidate import Candidate
from autotune.executors import base
from autotune.executors.local import LocalExecutor
from autotune.trial import TrialRequest

ROOT = Path(__file__).parent.parent
CODE_GPT, SMALL = ROOT / "studies" / "code-gpt" / "model.py", ROOT / "tests" / "models" / "ok.py"
# The target, the configuration, and how many steps of it.
CASES = {
    "fp32, ZeRO 0": (CODE_GPT, Candidate(micro_batch_size=8), 25),
    "bf16, ZeRO 1": (CODE_GPT, Candidate(micro_batch_size=8, precision="bf16", zero_stage=1), 25),
    "bf16, ZeRO 2, accumulation 2": (
        CODE_GPT, Candidate(micro_batch_size=8, gradient_accumulation_steps=2, precision="bf16", zero_stage=2), 25,
    ),
    "a small model": (SMALL, Candidate(micro_batch_size=8), 400),
}  # fmt: skip


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        executor = LocalExecutor(["torch"], folder / "server.log")
        try:
            for number in range(rounds):
                for label, (target, candidate, steps) in CASES.items():
                    request = TrialRequest(
                        target=str(target), candidate=candidate.values(), ds_config=candidate.to_deepspeed(), world_size=2,
                        max_steps=steps, min_samples=10**9,
                    )  # fmt: skip
                    result = base.run(executor, folder / f"{number}-{label}", request)
                    assert result.steps is not None, result.reason
                    _, times = plain_trial(target, candidate.to_deepspeed(), folder, steps)
                    found[label].append((result.steps.median_s, stats.summarise(times).median_s))
        finally:
            executor.close()
    write(
        "claim",
        {
            label: {
                "claimed_s": statistics.median(ours for ours, _ in pairs),
                "torchrun_s": statistics.median(theirs for _, theirs in pairs),
                "ratio": statistics.median(theirs / ours for ours, theirs in pairs),
                "pairs": pairs,
            }
            for label, pairs in found.items()
        },
    )


if __name__ == "__main__":
    main()
