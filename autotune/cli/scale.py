"""The command `scale`: measure one configuration on several numbers of ranks, in turns."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from autotune.cli.options import AsJson, Target, option, takes_settings
from autotune.cli.status import SCALING
from autotune.errors import UserError
from autotune.study.lock import study_lock
from autotune.system.files import shown
from autotune.system.machine import n_cores

if TYPE_CHECKING:
    from autotune.executors.base import Executor
    from autotune.scoring.scaling import Mode, Run, Scale
    from autotune.space.candidate import Candidate
    from autotune.study.events import EventSink
    from autotune.study.setup.plan import Plan
    from autotune.trial.result import TrialResult

    Configurations: TypeAlias = Mapping[int, Candidate]
    Asked: TypeAlias = tuple[int, Candidate]

# What helps where a rank count does not run.
REMEDIES = {
    "oom": "Fewer ranks hold larger shards: raise zero_stage, offload, or leave that number of ranks out",
    "timeout": "Give it more time by --trial-deadline, or look in the log for what the ranks wait for",
    "too_few_steps": "Give the script more steps or more data, or leave that number of ranks out: each takes a share of the samples",
    "not_applied": "The target does not follow its configuration on this number of ranks; `autotune check` says why",
    "diverged": "Its loss is no number there; try a lower learning rate or fp32",
}
NO_NOISE = (
    "the time to the same loss with another global batch takes the gradient noise scale, which is not known: a study"
    " named {} (or --study NAME) with the objective convergence and --global-batch free measures it"
)


def rank_counts(text: str) -> list[int]:
    """Rank counts such as `1,2,4`, the fewest first."""
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

    Yields:
        A note for the user of a CPU.
    """
    given = os.environ.get("OMP_NUM_THREADS")
    threads = given or str(max(1, n_cores() // most))
    os.environ["OMP_NUM_THREADS"] = threads
    try:
        yield f"OMP_NUM_THREADS={threads} for every rank, whatever their number, so that more ranks are more cores"
    finally:
        if given is None:
            del os.environ["OMP_NUM_THREADS"]


def configurations(base: Candidate, counts: Sequence[int], mode: Mode | None) -> tuple[dict[Mode, Configurations], str]:
    """The configurations of each way of scaling, and a note where one of them is impossible.

    Args:
        base: The configuration of the most ranks.
        counts: Numbers of ranks.
        mode: `strong` or `weak`; None for both.
    """
    from autotune.scoring import scaling

    if mode is not None:
        return {mode: scaling.candidates(base, counts, mode)}, ""
    weak = scaling.candidates(base, counts, "weak")
    try:
        return {"strong": scaling.candidates(base, counts, "strong"), "weak": weak}, ""
    except scaling.ScalingError as error:
        return {"weak": weak}, f"weak scaling only: {error}"


def measure(
    plan: Plan, executor: Executor, folder: Path, wanted: Sequence[Configurations], rounds: int, events: EventSink
) -> Iterator[tuple[Asked, Run | str]]:
    """Measure every configuration once in each round; one that fails is not tried again.

    Args:
        wanted: For each way of scaling the configuration of each rank count; what they share is measured once.

    Yields:
        The rank count and configuration of a run, and what it measured; a sentence where it failed.
    """
    from autotune.executors import base
    from autotune.scoring.metrics import METRICS
    from autotune.trial.folder import TrialDir
    from autotune.trial.result import Outcome

    asked: list[Asked] = list(dict.fromkeys((n, candidate) for each in wanted for n, candidate in each.items()))
    asked.sort(key=lambda each: each[0])
    failed: set[Asked] = set()
    spec = plan.spec
    for number in range(rounds):
        for n, candidate in asked:
            if (n, candidate) in failed:
                continue
            ranks = f"{n} rank{'s' if n > 1 else ''}"
            events.say(f"round {number + 1} of {rounds}: {ranks}, {candidate.describe()}")
            other = "" if (n, candidate) == next(each for each in asked if each[0] == n) else "-weak"
            path = folder / "trials" / f"{number}-{n}{other}"
            request = replace(plan.request(candidate).on_ranks(n, spec.nodes_for(n)), budget_s=spec.trial_budget_s)
            with executor.turn(events.waiting):
                result = base.run(executor, path, request, events.tick)
            rate = METRICS["samples_per_s"].of(result, None)
            if result.outcome is not Outcome.COMPLETE or rate is None or not result.samples_per_step:
                log, remedy = shown(TrialDir(path).log(result.failed_rank or 0)), REMEDIES.get(result.outcome, "")
                what = f"{ranks} did not run ({result.end}); see {log}"
                failed.add((n, candidate))
                yield (n, candidate), f"{what}. {remedy}" if remedy else what
                continue
            yield (n, candidate), _run(result, rate.value, path, number, plan.workload.n_blocks)


def _run(result: TrialResult, samples_per_s: float, path: Path, number: int, n_blocks: int) -> Run:
    """What a run in a folder measured, in round `number`."""
    from autotune.report import diagnosis
    from autotune.scoring.scaling import LONG, Run

    assert result.steps is not None and result.samples_per_step
    parts, step_s = diagnosis.step_parts(result, path, n_blocks), result.samples_per_step / samples_per_s
    seconds = {name: part.seconds for name, part in parts.items() if part.seconds is not None}
    if seconds:
        seconds[LONG] = max(0.0, step_s - result.steps.median_s)
    return Run(
        world_size=result.world_size, round=number, samples_per_s=samples_per_s, step_s=step_s,
        samples_per_step=result.samples_per_step, parts_s=seconds, busy_s=diagnosis.busy_s(path, result.world_size),
        communication=parts["communication"].share if "communication" in parts else None,
    )  # fmt: skip


def noise_samples(name: str, storage: str | None, studies: Path) -> float | None:
    """The gradient noise scale that the study of this name has measured; None without such a study, or where it is not known."""
    from autotune.session import open_study

    with contextlib.suppress(UserError):
        reference = open_study(name, storage, studies).record.reference
        if reference is not None and reference.noise is not None and reference.noise.resolved:
            return reference.noise.samples
    return None


@takes_settings(
    "base_config", "script_set", "name", "nodes", "executor", "executor_options", "hostfile", "storage", "trial_deadline_s",
    base_config="The DeepSpeed configuration to scale.",
    name="Study whose folder takes the result, and whose noise scale is used if it has run.",
    storage="Database of that study.",
)  # fmt: skip
def scale(
    target: Target,
    settings: Mapping[str, Any],
    ranks: Annotated[str, option("1,2,4", "Rank counts to compare.")] = "1,2",
    *,
    weak: Annotated[
        bool | None,
        typer.Option(
            "--weak/--strong",
            help="Let the global batch grow with the ranks, or keep it; both by default.",
            show_default=False,
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="How often to measure each, in turns.")] = 3,
    png: Annotated[Path | None, option("FILE", "Draw the plots as PNG, too; takes an installed Chromium.")] = None,
    as_json: AsJson = False,
) -> int:
    """Measure a configuration on several numbers of ranks, in turns; the exit status is 0 if all of them ran, else 1."""
    from autotune.report.progress import ProgressView

    mode: Mode | None = None if weak is None else "weak" if weak else "strong"
    counts = rank_counts(ranks)
    with ProgressView() as view:
        view.opening(target)
        from autotune.report.page import scaling as page
        from autotune.study.events import Broadcast, Journal
        from autotune.study.setup.capture import wanted_study
        from autotune.study.setup.engine import executor_for
        from autotune.study.setup.plan import plan
        from autotune.study.setup.request import studies_folder

        wanted, notes = wanted_study(target, {**settings, "ranks": max(counts)}, view)
    studies = studies_folder(Path(target))
    folder, on_each = studies / wanted.name / SCALING, max(counts) // wanted.nodes_for(max(counts))
    with study_lock(folder, wanted.name):  # until the page is written: `autotune status`, which follows it, names that
        with ProgressView() as view, equal_threads(on_each) as threads:
            shutil.rmtree(folder / "trials", ignore_errors=True)
            logged = Broadcast(Journal(folder), view)
            logged.doing(f"scaling of {wanted.name}: importing torch and DeepSpeed once")
            with executor_for(wanted, folder, logged.waits) as executor:
                found = plan(wanted, executor, folder, logged)
                on_cpu = found.workload.environment.accelerator == "cpu"
                notes += [*found.notes, *([threads] if on_cpu else [])]
                ways, note = configurations(found.baseline, counts, mode)
                runs, failures, stopped = until_stopped(
                    measure(found, executor, folder, list(ways.values()), rounds, logged)
                )
        noise = noise_samples(wanted.name, wanted.storage, studies)
        scales = _scales(ways, runs, found.workload.n_samples, noise)
        notes = [*filter(None, [note]), *notes, *failures, *_advice(scales)]
        if any(each[-1].same_loss is None for each in scales.values()):
            notes.append(NO_NOISE.format(wanted.name))
        _tell(scales, wanted.name, notes, folder.parent / "scaling.html", as_json=as_json)
    if scales and png is not None:
        page.draw(scales, png)
    if stopped is not None:
        raise stopped
    return 1 if failures or not scales else 0


def until_stopped(
    measured: Iterator[tuple[Asked, Run | str]],
) -> tuple[dict[Asked, list[Run]], list[str], KeyboardInterrupt | None]:
    """The runs by rank count and configuration, what failed, and what stopped them: what was measured until then is kept."""
    runs: dict[Asked, list[Run]] = {}
    failures: list[str] = []
    try:
        for asked, run in measured:
            if isinstance(run, str):
                failures.append(run)
            else:
                runs.setdefault(asked, []).append(run)
    except KeyboardInterrupt as stop:
        return runs, failures, stop
    return runs, failures, None


def _scales(
    ways: Mapping[Mode, Configurations], runs: Mapping[Any, Sequence[Run]], n_samples: int | None, noise: float | None
) -> dict[Mode, list[Scale]]:
    """What was measured, by way of scaling; ways of which nothing ran are left out."""
    from autotune.scoring import scaling

    compared = {
        way: scaling.scaling([run for each in asked.items() for run in runs.get(each, ())], n_samples, noise)
        for way, asked in ways.items()
    }
    return {way: each for way, each in compared.items() if each}


def _advice(scales: Mapping[Mode, list[Scale]]) -> list[str]:
    """What to do about the losses; what is said of one of several ways alone names that way."""
    from autotune.scoring import scaling

    said = {way: scaling.advice(each) for way, each in scales.items()}
    return list(
        dict.fromkeys(
            text if all(text in each for each in said.values()) else f"{way} scaling: {text}"
            for way, texts in said.items()
            for text in texts
        )
    )


def _tell(scales: dict[Mode, list[Scale]], name: str, notes: Sequence[str], path: Path, *, as_json: bool) -> None:
    """Print what was measured, and write it as a page."""
    from autotune.report.page import scaling as page

    if scales:
        page.write(scales, name, notes, path)
    if as_json:
        data = {way: [asdict(each) for each in each_of] for way, each_of in scales.items()}
        print(json.dumps({"scaling": data, "notes": notes}, indent=1))
    elif scales:
        for way, each in scales.items():
            print("\n".join([*page.lines(each, way), ""]))
        print(f"wrote {shown(path)}")
    for text in notes:
        print(f"note: {text}", file=sys.stderr)
