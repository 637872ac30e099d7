"""Is the step time that a trial claims the one that training has? The same configurations, ours and torchrun, interleaved.

`python benchmarks/claim.py [ROUNDS]`: for each of three configurations of code-gpt the ratio of the step time under a plain torchrun
script to the step time that an autotune trial measures.
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

TARGET = Path(__file__).parent.parent / "studies" / "code-gpt" / "model.py"
STEPS = 25
CANDIDATES = {
    "fp32, ZeRO 0": Candidate(micro_batch_size=8),
    "bf16, ZeRO 1": Candidate(micro_batch_size=8, precision="bf16", zero_stage=1),
    "bf16, ZeRO 2, accumulation 2": Candidate(micro_batch_size=8, gradient_accumulation_steps=2, precision="bf16", zero_stage=2),
}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CANDIDATES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        executor = LocalExecutor(["torch"], folder / "server.log")
        try:
            for number in range(rounds):
                for label, candidate in CANDIDATES.items():
                    request = TrialRequest(
                        target=str(TARGET), candidate=candidate.values(), ds_config=candidate.to_deepspeed(), world_size=2, max_steps=STEPS
                    )
                    result = base.run(executor, folder / f"{number}-{len(found[label])}", request)
                    assert result.steps is not None, result.reason
                    _, times = plain_trial(TARGET, candidate.to_deepspeed(), folder, STEPS)
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
