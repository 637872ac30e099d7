"""Measures every legal configuration of a study's space, several times, into a table that `search.py` and `forecast.py` replay.

`python benchmarks/truth.py benchmarks/truth/NAME.yaml` writes `benchmarks/truth/NAME.csv.gz` and, beside it, what the
study was planned on. It takes trials x repeats x (start-up + budget); run again it goes on where it was. Each repeat
goes through the space in an order of its own, so that a machine that drifts slows no configuration more than another.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import request_of
from pydantic import TypeAdapter
from replay import Row, read_table, write_table

from autotune.executors import base
from autotune.scoring import metrics
from autotune.scoring.convergence.time_to_loss import Reference
from autotune.space.candidate import Candidate
from autotune.space.legality import why_illegal
from autotune.space.space import SearchSpace
from autotune.study.measure import ENDLESS_SAMPLES
from autotune.study.setup.engine import executor_for
from autotune.study.setup.plan import Plan, plan, profiled
from autotune.study.spec.spec import StudySpec
from autotune.study.storage.records import SearchRecord
from autotune.trial import folder
from autotune.trial.result import Outcome, TrialResult
from autotune.trial.target import inspect_target
from autotune.trial.workload import Workload

KEPT_LOSSES = 12
WRITE_EVERY = 10


def collect(path: Path, repeats: int, at_most: int | None, budget_s: float | None) -> None:
    """Fills the table of a study."""
    spec = StudySpec.load(path, {"trial_budget_s": budget_s})
    table = path.with_suffix(".csv.gz")
    rows = read_table(table) if table.exists() else []
    with tempfile.TemporaryDirectory() as scratch, executor_for(spec, Path(scratch)) as executor:
        found = profiled(plan(spec, executor, Path(scratch)), executor, Path(scratch))  # where a study's search starts
        keep_plan(found, path)
        every = found.space.candidates(found.baseline)
        legal = [c for c in every if why_illegal(c, found.setting) is None and c != found.baseline]
        if at_most is not None and len(legal) > at_most - 1:
            legal = random.Random(0).sample(legal, at_most - 1)
        done = {(row.candidate, row.repeat) for row in rows}
        first = run(found, executor, Path(scratch) / "trials" / "first", found.baseline, ENDLESS_SAMPLES)
        if first.outcome is not Outcome.COMPLETE:
            sys.exit(f"truth: the baseline, with which all is compared, ended so: {first.outcome}: {first.reason}")
        reference = Reference.of(first)
        n_samples = len(first.step_times_s) * (first.samples_per_step or 0)
        total, start = (len(legal) + 1) * repeats, time.monotonic()
        for repeat in range(repeats):
            order = [found.baseline, *legal]
            random.Random(repeat).shuffle(order)
            for candidate in order:
                if (candidate, repeat) in done:
                    continue
                result = run(found, executor, Path(scratch) / "trials" / "one", candidate, n_samples)
                rows.append(row_of(candidate, repeat, result, reference))
                if len(rows) % WRITE_EVERY == 0:
                    write_table(table, rows)
                    print(f"{len(rows)} of {total}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    write_table(table, rows)
    n_complete = sum(row.outcome is Outcome.COMPLETE for row in rows)
    n_configurations = len({row.candidate for row in rows})
    print(f"{table}: {len(rows)} measurements of {n_configurations} configurations, {n_complete} complete")


def run(found: Plan, executor: Any, path: Path, candidate: Candidate, n_samples: int) -> TrialResult:
    """One trial, as a study runs it."""
    spec = found.spec
    request = request_of(
        spec.target, candidate, ds_config=found.ds_config(candidate), world_size=found.world_size, seed=spec.seed,
        budget_s=spec.trial_budget_s, min_samples=n_samples, deadline_s=spec.trial_deadline_s, script=found.script(candidate),
    )  # fmt: skip
    with executor.turn(lambda: None):
        return base.run(executor, path, request)


def row_of(candidate: Candidate, repeat: int, result: TrialResult, reference: Reference) -> Row:
    """A trial as a line of the table."""
    estimates = metrics.measure(result, reference)
    names = ("step_time_s", "peak_memory_bytes", "time_to_loss_s")
    values = {name: estimates[name].value for name in names if name in estimates}
    values |= {f"{name}_s": seconds for name, seconds in result.micro_step_s.items()}
    if result.steps is not None:
        values |= {"ci95_s": result.steps.ci95_s, "n_steps": result.steps.n_steps}
    values |= {"wall_s": result.wall_s, "startup_s": max(0.0, result.wall_s - sum(result.step_times_s))}
    values |= {name: float(n) for name in ("samples_per_step", "tokens_per_step") if (n := getattr(result, name))}
    losses = [loss for loss in result.losses if loss is not None]
    if losses:
        values["final_loss"] = sum(losses[-3:]) / len(losses[-3:])
    return Row(
        candidate=candidate,
        repeat=repeat,
        outcome=result.outcome,
        reason=result.reason,
        values=values,
        losses=parts(losses),
    )


def parts(losses: list[float]) -> list[float]:
    """Means of equal parts of a curve."""
    n = min(KEPT_LOSSES, len(losses))
    edges = [round(i * len(losses) / n) for i in range(n + 1)] if n else []
    return [sum(losses[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


def keep_plan(found: Plan, path: Path) -> None:
    """Writes what the study was planned on, so that a replay needs neither torch nor the target's rank."""
    kept = {
        "workload": TypeAdapter(Workload).dump_python(found.workload, mode="json"),
        "world_size": found.world_size,
        "base_config": found.base_config,
        "baseline": found.baseline.values(),
        "search": TypeAdapter(SearchRecord).dump_python(
            SearchRecord(
                space=found.space.to_data(), samples_per_rank=found.space.samples_per_rank, setting=found.setting, memory_limit_bytes=None,
                bounds=[],
            ),
            mode="json",
        ),
    }  # fmt: skip
    folder.write_record(path.with_suffix(".json"), kept)


def planned(path: Path, changes: dict[str, Any]) -> Plan:
    """The plan of a collected study.

    Args:
        path: Its YAML file.
        changes: Fields of the study that a replay sets otherwise.
    """
    kept = json.loads(path.with_suffix(".json").read_text())
    search = TypeAdapter(SearchRecord).validate_python(kept["search"])
    spec = StudySpec.load(path, changes)
    space = SearchSpace(
        parameters=SearchSpace.parse(search.space, str(path)).parameters, samples_per_rank=search.samples_per_rank
    )
    return Plan(
        spec=spec, target=inspect_target(spec.target), workload=TypeAdapter(Workload).validate_python(kept["workload"]),
        world_size=kept["world_size"], base_config=kept["base_config"], baseline=Candidate.of(kept["baseline"]), space=space,
        full_space=space, setting=search.setting,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", type=Path)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--at-most", type=int, help="so many configurations, drawn at random")
    parser.add_argument("--budget", type=float, help="training seconds of a trial, in place of the study's")
    arguments = parser.parse_args()
    collect(arguments.study, arguments.repeats, arguments.at_most, arguments.budget)


if __name__ == "__main__":
    main()
