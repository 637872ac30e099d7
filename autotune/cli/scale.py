"""The command `scale`: measure one configuration on several numbers of ranks, in turns."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from autotune.cli.options import AsJson, Target, takes_settings
from autotune.cli.status import SCALING
from autotune.errors import UserError
from autotune.study.lock import study_lock
from autotune.system.files import shown
from autotune.system.signals import terminable

if TYPE_CHECKING:
    from autotune.executors.base import Executor
    from autotune.scoring.scaling import Run
    from autotune.space.candidate import Candidate
    from autotune.study.events import EventSink
    from autotune.study.setup.plan import Plan


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
    """Gives every rank as many threads as it has at the largest number of ranks.

    On a CPU a single rank would take all cores, and no number of ranks could be faster. The variable must be set before
    the ranks' server starts, which inherits it.

    Args:
        most: The largest number of ranks.

    Yields:
        A note for the user of a CPU.
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
    plan: Plan, executor: Executor, folder: Path, candidates: Mapping[int, Candidate], rounds: int, events: EventSink
) -> tuple[list[Run], list[str]]:
    """Measure every rank count once in each round; one that fails is not tried again.

    Args:
        plan: The target and what is known of it.
        executor: The engine.
        folder: Where the trials' files go.
        candidates: The configuration for each rank count.
        rounds: Rounds.
        events: Receives what is measured.

    Returns:
        The runs, and a sentence for each rank count that failed.
    """
    from autotune.executors import base
    from autotune.report import diagnosis
    from autotune.scoring.scaling import Run
    from autotune.trial.folder import TrialDir
    from autotune.trial.request import TrialRequest
    from autotune.trial.result import Outcome

    runs, failures, spec = list[Run](), dict[int, str](), plan.spec
    for number in range(rounds):
        for n, candidate in candidates.items():
            if n in failures:
                continue
            events.say(f"round {number + 1} of {rounds}: {n} rank{'s' if n > 1 else ''}, {candidate.describe()}")
            path = folder / "trials" / f"{number}-{n}"
            request = TrialRequest(
                target=str(spec.target), candidate=candidate.values(), ds_config=plan.ds_config(candidate),
                world_size=n, nodes=spec.nodes_for(n), seed=spec.seed, budget_s=spec.trial_budget_s,
                deadline_s=spec.trial_deadline_s, device_memory_bytes=spec.device_memory_bytes,
                script=plan.script(candidate),
            )  # fmt: skip
            with executor.turn(events.waiting):
                result = base.run(executor, path, request, events.tick)
            if result.outcome is not Outcome.COMPLETE or result.steps is None or not result.samples_per_step:
                log = shown(TrialDir(path).log(result.failed_rank or 0))
                failures[n] = f"{n} ranks did not run ({result.outcome}: {result.reason}); see {log}"
                continue
            step_s, n_samples = result.steps.median_s, result.samples_per_step
            share = diagnosis.communication(result, path, plan.workload.n_blocks)
            run = Run(
                world_size=n, round=number, samples_per_s=n_samples / step_s, step_s=step_s,
                samples_per_step=n_samples, communication=share,
            )  # fmt: skip
            runs.append(run)
    return runs, list(failures.values())


@takes_settings("base_config", "script_set", base_config="The DeepSpeed configuration to scale.")
def scale(
    target: Target,
    settings: Mapping[str, Any],
    ranks: Annotated[str, typer.Option(metavar="1,2,4", help="Rank counts to compare.")] = "1,2",
    *,
    weak: Annotated[
        bool, typer.Option("--weak/--strong", help="Let the global batch grow with the ranks, or keep it.")
    ] = False,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="How often to measure each, in turns.")] = 3,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the plots as PNG, too; takes an installed Chromium.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Measure a configuration on several numbers of ranks, in turns.

    Returns:
        Exit status: 0 all of them ran, 1 not.
    """
    from autotune.report.progress import ProgressView

    mode: Literal["weak", "strong"] = "weak" if weak else "strong"
    counts = rank_counts(ranks)
    with ProgressView() as view:
        view.opening(target)
        from autotune.report.page import scaling as page
        from autotune.scoring import scaling
        from autotune.study.events import Broadcast, Journal
        from autotune.study.setup.capture import wanted_study
        from autotune.study.setup.engine import executor_for
        from autotune.study.setup.plan import plan, studies_folder

        wanted, notes = wanted_study(target, {**settings, "ranks": max(counts)}, view)
    folder = studies_folder(Path(target)) / wanted.name / SCALING
    with ProgressView() as view, terminable(), equal_threads(max(counts)) as threads, study_lock(folder, wanted.name):
        shutil.rmtree(folder / "trials", ignore_errors=True)
        logged = Broadcast(Journal(folder), view)
        logged.doing(f"scaling of {wanted.name}: importing torch and DeepSpeed once")
        with executor_for(wanted, folder, view.waits) as executor:
            found = plan(wanted, executor, folder)
            environment = found.workload.environment
            if environment.accelerator != "cpu" and environment.n_devices < max(counts):
                raise UserError(
                    f"scale: {max(counts)} ranks need as many devices; this machine has {environment.n_devices}"
                )
            notes += [*found.notes, *found.workload.caveats, *([threads] if environment.accelerator == "cpu" else [])]
            configurations = scaling.candidates(found.baseline, counts, mode)
            runs, failures = measure(found, executor, folder, configurations, rounds, logged)
    scales = scaling.scaling(runs, found.workload.n_samples)
    notes += failures
    if scales:
        page.write(scales, mode, wanted.name, notes, folder.parent / "scaling.html")
    if as_json:
        print(json.dumps({"mode": mode, "scales": [asdict(each) for each in scales], "notes": notes}, indent=1))
    elif scales:
        for line in page.lines(scales, mode):
            print(line)
        print(f"\nwrote {shown(folder.parent / 'scaling.html')}")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if scales and png is not None:
        page.draw(scales, mode, png)
    return 1 if failures or not scales else 0
