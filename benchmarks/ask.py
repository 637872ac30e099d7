"""How long the physics-guided sampler thinks about one trial of a large study.

`python benchmarks/ask.py`: one process, one thread, three objectives, a memory limit, 200 trials told, about 100,000
legal candidates.
"""

from __future__ import annotations

import os
import statistics
import time

from autotune.space.legality import why_illegal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import common
import numpy as np
from threadpoolctl import threadpool_limits

from autotune.forecast.predictor import AnalyticPrior
from autotune.search.observation import Observation
from autotune.search.optimizer import CandidateOptimizer
from autotune.space.candidate import Candidate
from autotune.space.rule import Setting
from autotune.space.space import SearchSpace
from autotune.trial.profile import Machine, Profile
from autotune.trial.result import Outcome

RANKS, LIMIT_BYTES, N_TOLD, REPEATS = 8, 60e9, 200, 9
SPACE = {
    "micro_batch_size": list(range(1, 157)),
    "gradient_accumulation_steps": [1, 2, 4, 8, 16],
    "zero_stage": [0, 1, 2, 3],
    "precision": ["fp32", "bf16"],
    "checkpoint_every": [0, 1, 2, 4],
    "zero_optimization.overlap_comm": {"choices": [None, True], "when": {"zero_stage": [1, 2]}},
    "zero_optimization.reduce_bucket_size": {"choices": [10**7, 10**8, 5 * 10**8], "when": {"zero_stage": [1, 2, 3]}},
}


def main() -> None:
    base = Candidate(micro_batch_size=4)
    setting = Setting(accelerator="cuda", world_size=RANKS, n_blocks=24)
    candidates = [c for c in SearchSpace.parse(SPACE, "benchmark").candidates(base) if why_illegal(c, setting) is None]
    prior = AnalyticPrior(Profile.guess(1_300_000_000, 1_300_000_000, 24), Machine.guess("cuda", RANKS, 16))
    metrics = ["step_time_s", "samples_per_s", "time_to_loss_s"]
    guide = CandidateOptimizer(
        candidates, prior, metrics, world_size=RANKS, memory_limit_bytes=LIMIT_BYTES, reference=base
    )
    told = measured(candidates, prior)
    seconds = []
    with threadpool_limits(1, "blas"):
        for n in range(N_TOLD - REPEATS, N_TOLD):  # each time with one trial more, so that nothing is remembered
            start = time.perf_counter()
            assert guide.suggest(told[: n + 1]) is not None
            seconds.append(time.perf_counter() - start)
    found = {"candidates": len(candidates), "trials_told": N_TOLD, "median_s": statistics.median(seconds)}
    common.write("ask", found | {"largest_s": max(seconds)})


def measured(candidates: list[Candidate], prior: AnalyticPrior) -> list[Observation]:
    """Trials of random candidates on a machine that is 20 % slower than the prior says, with 2 % of noise."""
    rng = np.random.default_rng(0)
    found = prior(candidates)
    step_s = 1.2 * found.time_terms.sum(axis=1) * np.exp(rng.normal(0, 0.02, len(candidates)))
    n_bytes = found.memory_terms.sum(axis=1)
    told = []
    for row in rng.choice(len(candidates), N_TOLD, replace=False):
        candidate, seconds = candidates[row], float(step_s[row])
        if n_bytes[row] > LIMIT_BYTES:
            told.append(Observation(candidate=candidate, outcome=Outcome.OOM))
            continue
        batch = candidate.global_batch_size(RANKS)
        metrics = {
            "step_time_s": seconds,
            "samples_per_s": batch / seconds,
            "time_to_loss_s": seconds * (500 + batch) / batch,
        }
        micro_s = seconds / candidate.gradient_accumulation_steps
        told.append(
            Observation(
                candidate=candidate, metrics={**metrics, "peak_memory_bytes": float(n_bytes[row])}, inner_s=0.95 * micro_s,
                boundary_s=seconds - (candidate.gradient_accumulation_steps - 1) * 0.95 * micro_s,
            )
        )  # fmt: skip
    return told


if __name__ == "__main__":
    main()
