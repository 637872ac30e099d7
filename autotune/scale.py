"""Measures one configuration on several numbers of ranks, in turns."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from autotune import UserError
from autotune.analysis.scaling import Run
from autotune.candidate import Candidate
from autotune.executors import base
from autotune.executors.base import Executor
from autotune.plan import Plan, shown
from autotune.report import diagnosis
from autotune.study import Observer
from autotune.trial import Outcome, TrialDir, TrialRequest


def rank_counts(text: str) -> list[int]:
    """Rank counts such as `1,2,4`, the fewest first.

    Raises:
        UserError: It is no list of at least two.
    """
    try:
        counts = sorted({int(part) for part in text.split(",")}) if len(text) < 200 else []
    except ValueError:
        counts = []
    if len(counts) < 2 or counts[0] < 1:
        raise UserError(f"scale: --ranks takes two or more rank counts, as in --ranks 1,2,4; it was {text!r}")
    return counts


@contextlib.contextmanager
def equal_threads(most: int) -> Iterator[str]:
    """Gives every rank the threads that it has where there are most ranks.

    On a CPU a rank alone would take all cores, and no number of ranks could be faster. It must be said before the ranks' server
    starts, which inherits it.

    Args:
        most: The largest number of ranks.

    Yields:
        What is to be said of it on a CPU.
    """
    given = os.environ.get("OMP_NUM_THREADS")
    threads = given or str(max(1, len(os.sched_getaffinity(0)) // most))
    os.environ["OMP_NUM_THREADS"] = threads
    try:
        yield f"OMP_NUM_THREADS={threads} for every rank, whatever their number, so that more ranks are more cores"
    finally:
        if given is None:
            del os.environ["OMP_NUM_THREADS"]


def measure(
    plan: Plan, executor: Executor, folder: Path, candidates: Mapping[int, Candidate], rounds: int, observer: Observer
) -> tuple[list[Run], list[str]]:
    """Measures every rank count once a round; one that fails is not tried again.

    Args:
        plan: The target and what is known of it.
        executor: The engine.
        folder: Where the trials' files go.
        candidates: The configuration for each rank count.
        rounds: Rounds.
        observer: Whoever watches.

    Returns:
        The runs, and what failed in words.
    """
    runs: list[Run] = []
    failures: dict[int, str] = {}
    for number in range(rounds):
        for n, candidate in candidates.items():
            if n in failures:
                continue
            observer.say(f"round {number + 1} of {rounds}: {n} rank{'s' if n > 1 else ''}, {candidate.describe()}")
            path = folder / "trials" / f"{number}-{n}"
            request = TrialRequest(
                target=str(plan.spec.target), candidate=candidate.values(), ds_config=plan.ds_config(candidate), world_size=n,
                nodes=plan.spec.nodes_for(n), seed=plan.spec.seed, budget_s=plan.spec.trial_budget_s, deadline_s=plan.spec.trial_deadline_s,
                device_memory_bytes=plan.spec.device_memory_bytes, script=plan.script(candidate),
            )  # fmt: skip
            with executor.turn(observer.waiting):
                result = base.run(executor, path, request, observer.tick)
            if result.outcome is not Outcome.COMPLETE or result.steps is None or not result.samples_per_step:
                log = shown(TrialDir(path).log(result.failed_rank or 0))
                failures[n] = f"{n} ranks did not run ({result.outcome}: {result.reason}); see {log}"
                continue
            step_s = result.steps.median_s
            share = diagnosis.communication(result, path, plan.workload.n_blocks)
            rate = result.samples_per_step / step_s
            runs.append(
                Run(
                    world_size=n,
                    round=number,
                    samples_per_s=rate,
                    step_s=step_s,
                    samples_per_step=result.samples_per_step,
                    communication=share,
                )
            )
    return runs, list(failures.values())
