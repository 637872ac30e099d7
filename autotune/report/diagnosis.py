"""`autotune diagnose`: gathers what a trial left behind, has it diagnosed, and says it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autotune import store, trial
from autotune.analysis.bottleneck import Advice, Diagnosis, Evidence, Seen, diagnose
from autotune.analysis.effects import effects
from autotune.report import Data, StudyReport, measured, units, words
from autotune.report.plots import said
from autotune.trial import TrialDir, TrialRequest, TrialResult


def of_trial(report: StudyReport, folder: Path, number: int) -> Diagnosis:
    """Diagnoses a trial of a study.

    Args:
        report: The study.
        folder: Its folder.
        number: The trial; it completed.
    """
    rows = {row["trial"]: row for row in report.trials}
    points = report.points()
    seen = {each: _seen(row, points.get(each, row)) for each, row in rows.items()}
    paths = [store.trial_path(folder, number), *store.repeat_paths(folder, number).values()]
    result = trial.result_in(paths[0])
    ranks = [found for path in paths if (found := phases(path, report.world_size))]
    if not ranks and seen[number].phases_s:  # the folder is gone; the database keeps the slowest rank's
        ranks = [{0: seen[number].phases_s}]
    evidence = Evidence(
        seen=seen[number],
        world_size=report.world_size,
        ranks=ranks,
        step_s=measured(points[number]).get("step_time_s"),
        peak_memory_bytes=measured(points[number]).get("peak_memory_bytes"),
        memory_limit_bytes=_limit(report, paths[0]),
        alloc_retries=result.alloc_retries if result else None,
        n_parameters=int(report.workload.get("n_parameters") or 0),
        n_blocks=int(report.workload.get("n_blocks") or 0),
        tokens_per_step=result.tokens_per_step if result else None,
        device_name=str(report.environment.get("device_name") or ""),
    )
    told = [(row.candidate, row.samples_per_s) for row in seen.values() if row.samples_per_s]
    knobs = effects("samples_per_s", told, seen[number].candidate)
    return diagnose(evidence, [each for each in seen.values() if each.trial != number], knobs)


def _seen(row: Data, point: Data) -> Seen:
    return Seen(
        trial=row["trial"],
        candidate=row["candidate"],
        samples_per_s=measured(point).get("samples_per_s"),
        outcome=str(row["outcome"]),
        phases_s=row.get("phase_times_s") or {},
    )


def phases(path: Path, world_size: int) -> dict[int, Mapping[str, float]]:
    """The step that each rank of a trial took apart, where it did."""
    found = trial.reports(TrialDir(path), world_size)
    return {rank: report.phase_times_s for rank, report in found.items() if report.phase_times_s}


def _limit(report: StudyReport, path: Path) -> float | None:
    """What a rank may use: what the user stated, else the device's memory, on a CPU a rank's share of the machine's."""
    try:
        stated = trial.read(TrialDir(path).request, TrialRequest).device_memory_bytes
    except (FileNotFoundError, ValueError):
        stated = None
    if stated:
        return float(stated)
    memory = report.environment.get("device_memory_bytes")
    return float(memory) / (1 if report.environment.get("accelerator") != "cpu" else report.world_size) if memory else None


def communication(result: TrialResult, path: Path, n_blocks: int) -> float | None:
    """The estimated share of communication in a trial's step; None where its phases were not timed."""
    ranks = phases(path, result.world_size)
    if not ranks:
        return None
    seen = Seen(trial=0, candidate=result.candidate, samples_per_s=None, outcome=str(result.outcome), phases_s=result.phase_times_s)
    found = diagnose(Evidence(seen=seen, world_size=result.world_size, ranks=[ranks], n_blocks=n_blocks), [])
    return next(part.share for part in found.parts if part.name == "communication")


def as_data(report: StudyReport, found: Diagnosis) -> dict[str, Any]:
    """A diagnosis for programs."""
    row = next(row for row in report.trials if row["trial"] == found.trial)
    return {"study": report.name, "candidate": row["candidate"], **asdict(found)}


def lines(report: StudyReport, found: Diagnosis) -> Iterator[str]:
    """A diagnosis for a terminal."""
    row = next(row for row in report.trials if row["trial"] == found.trial)
    marks = ", ".join(report.marks().get(found.trial, ()))
    yield f"trial {found.trial}: {words(row['candidate'])}" + (f" ({marks})" if marks else "")
    yield f"bound by {found.bound_by}" if found.bound_by else "what bounds it is not known"
    yield ""
    times = [part.seconds for part in found.parts if part.seconds]
    scale = units.scale("step_time_s", times)
    cells = [("part of the step", "share", scale.unit, "how it is known")]
    for part in found.parts:
        share = "-" if part.share is None else f"{part.share:.0%}" if part.share >= 0.005 else "0%"
        cells.append((part.name, share, "-" if part.seconds is None else scale.number(part.seconds), part.known))
    wide = [max(len(line[i]) for line in cells) for i in range(3)]
    yield from (f"  {name:<{wide[0]}}  {share:>{wide[1]}}  {time:>{wide[2]}}  {how}".rstrip() for name, share, time, how in cells)
    yield ""
    if found.advice:
        yield "What the study's other trials say about the knobs that matter here:"
        yield from (f"  - {_advice(each)}" for each in found.advice[:8])
    elif found.bound_by:
        yield "No other trial of this study says that another value of the knobs that matter here would be faster."
    yield from (f"note: {note}" for note in found.notes)


def _advice(each: Advice) -> str:
    return f"{each.knob} {said(each.value)} instead of {said(each.before)}: {each.factor:.2f}x the throughput ({each.why})"
