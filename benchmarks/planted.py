"""Six causes planted in real trials, each measured several times: is each of them named, with a trace and without?

python benchmarks/planted.py [ROUNDS]
"""

import itertools
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common import ROOT, complete, engine, request_of, write
from support.diagnosed import of_result

from autotune.executors import base
from autotune.executors.local import LocalExecutor
from autotune.space.candidate import Candidate
from autotune.study.setup import profile_cache
from autotune.trial.folder import TrialDir, read_record
from autotune.trial.request import TrialRequest
from autotune.trial.workload import Workload

MODELS = ROOT / "tests" / "models"
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
TRACED_STEPS = 2


@dataclass(frozen=True)
class Planted:
    """A trial whose bottleneck is known, since it was put there."""

    name: str
    target: Path
    verdicts: tuple[str, ...]
    ranks: int = 2
    knobs: dict[str, Any] = field(default_factory=dict)


CASES = [
    Planted("slow loader", MODELS / "slow_loader.py", ("input pipeline",), knobs={"micro_batch_size": 8}),
    Planted("small batch", MODELS / "many_layers.py", ("launch overhead",), 1, {"micro_batch_size": 1, "gradient_accumulation_steps": 8}),
    Planted(
        "huge bucket latency", MODELS / "many_layers.py", ("communication",),
        knobs={"micro_batch_size": 16, "zero_stage": 2, "zero_optimization.reduce_bucket_size": 1024},
    ),
    Planted("one slow rank", MODELS / "slow_rank.py", ("stragglers",), knobs={"micro_batch_size": 8}),
    Planted("recompute-heavy", MODELS / "heavy_blocks.py", ("recomputation",), 1, {"micro_batch_size": 8, "checkpoint_every": 1}),
    Planted("optimizer-bound", MODELS / "wide_table.py", ("optimizer",), 1, {"micro_batch_size": 4}),
    # Not planted: nothing but arithmetic and memory is left.
    Planted("none", MODELS / "heavy_blocks.py", ("compute", "memory bandwidth"), 1, {"micro_batch_size": 8}),
]  # fmt: skip


def known(case: Planted, executor: LocalExecutor, folder: Path, config: dict[str, Any]) -> Workload:
    """The target as a study would know it: inspected and profiled, with the machine's rates."""
    base.run(executor, folder / "inspect", TrialRequest(target=str(case.target), mode="inspect"))
    workload = read_record(TrialDir(folder / "inspect").workload, Workload)
    return profile_cache.measure_missing(workload, case.target, config, case.ranks, executor, folder)[0]


def measured(case: Planted, executor: LocalExecutor, folder: Path, rounds: int) -> dict[str, Any]:
    """What `diagnose` says of a case's trials, without a trace and with one."""
    config = {} if "def optimizer" in case.target.read_text() else ADAMW
    workload, candidate = known(case, executor, folder, config), Candidate.of(case.knobs)
    request = request_of(
        case.target, candidate, ds_config=candidate.to_deepspeed(config), world_size=case.ranks, budget_s=1.0
    )
    row: dict[str, Any] = {"expected": case.verdicts, "verdicts": [], "traced_verdicts": [], "shares": []}
    for n, steps in itertools.product(range(rounds), (0, TRACED_STEPS)):
        path = folder / f"{n}-{steps}"
        with executor.turn(lambda: None):
            result = complete(executor, path, replace(request, traced_steps=steps))
        said = of_result(result, path, workload)
        print(f"{case.name}, round {n + 1}{', traced' if steps else ''}: {said.bound_by}", file=sys.stderr, flush=True)
        row["traced_verdicts" if steps else "verdicts"].append(said.bound_by)
        row["shares"].append({part.name: round(part.share, 3) for part in said.parts if part.share is not None})
    return row


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with engine() as (executor, folder):
        found = {case.name: measured(case, executor, folder / case.name, rounds) for case in CASES}
    right = {}
    for kind in ("verdicts", "traced_verdicts"):
        n = sum(set(row[kind]) <= set(row["expected"]) for row in found.values())
        right[kind] = f"{n} of {len(found)}"
    write("bottleneck", {"rounds": rounds, "right": right, "cases": found})


if __name__ == "__main__":
    main()
