"""`autotune diagnose`: reads the files of a trial, diagnoses what bounds its step, and writes that in words."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autotune.forecast.degrees import cost_terms
from autotune.forecast.knobs import Knobs
from autotune.forecast.step_time import STEP_BYTES
from autotune.report.data import THROUGHPUT, Data, StudyReport, interval, measured, metric_scale, times, words
from autotune.report.series import level_text
from autotune.report.tables import aligned
from autotune.scoring.bottleneck import diagnose
from autotune.scoring.effects import effects
from autotune.scoring.step_parts import Advice, Diagnosis, Evidence, Part, StepObservation
from autotune.space.candidate import Candidate
from autotune.study import tracing
from autotune.study.folder import repeat_paths, trial_path
from autotune.study.setup import profile_cache
from autotune.trial.folder import TrialDir, adapter, reports, result_in
from autotune.trial.links import Probe
from autotune.trial.result import Outcome, Traced, TrialResult
from autotune.trial.workload import Workload


def of_trial(report: StudyReport, folder: Path, number: int) -> Diagnosis:
    """Diagnoses a completed trial of a study."""
    rows = {row["trial"]: row for row in report.trials}
    seen, own = {each: _seen(row) for each, row in rows.items()}, measured(rows[number])
    path = trial_path(folder, number)
    result, again = result_in(path), result_in(tracing.path_in(folder, number))
    paths, beside_s = [path, *repeat_paths(folder, number).values()], None
    if again is not None and again.outcome is Outcome.COMPLETE and again.candidate == rows[number]["candidate"]:
        # Several steps, taken apart without the memory counters, which cost time.
        paths, beside_s = [tracing.path_in(folder, number)], again.steps.median_s if again.steps else None
    ranks = [found for path in paths if (found := phases(path, report.world_size))]
    if not ranks and seen[number].phases_s:  # the folder is gone; the database keeps the slowest rank's
        ranks = [{0: seen[number].phases_s}]
    evidence = Evidence(
        seen=seen[number],
        world_size=report.world_size,
        ranks=ranks,
        step_s=own.get("step_time_s"),
        beside_s=beside_s,
        peak_memory_bytes=own.get("peak_memory_bytes"),
        joules_per_sample=own.get("joules_per_sample"),
        memory_limit_bytes=report.memory_limit_bytes,
        **(_of_device(result) if result else {}),
        tokens_per_step=result.tokens_per_step if result else None,
        traced=traces(paths[0], report.world_size),
        **of_workload(
            adapter(Workload).validate_python(dict(report.workload)), seen[number].candidate, report.world_size
        ),
    )
    told = [(row.candidate, row.samples_per_s) for row in seen.values() if row.samples_per_s]
    knobs = effects("samples_per_s", told, seen[number].candidate)
    return diagnose(evidence, [each for each in seen.values() if each.trial != number], knobs)


def _seen(row: Data) -> StepObservation:
    rate = measured(row).get(THROUGHPUT)
    low, high = interval(row, THROUGHPUT, rate) if rate else (1.0, 1.0)
    broken = row["outcome"] == Outcome.COMPLETE and row.get("feasible") is False
    return StepObservation(
        trial=row["trial"],
        candidate=row["candidate"],
        samples_per_s=rate,
        log_reach=math.log(high / low) / 2,
        outcome="infeasible" if broken else str(row["outcome"]),  # whose values are not advised
        phases_s=row.get("phase_times_s") or {},
    )


def _of_device(result: TrialResult) -> dict[str, Any]:
    """The fields of `Evidence` on the device of a trial."""
    return {
        "alloc_retries": result.alloc_retries,
        "allocated_bytes": max(result.memory_by_phase_bytes.values(), default=None),
        "reserved_bytes": result.reserved_memory_bytes,
        "device_load": result.device_load,
        "tf32": result.observed.tf32 if result.observed else None,
        "padding": result.padding,
    }


def of_workload(workload: Workload, candidate: Data, world_size: int) -> dict[str, Any]:
    """The fields of `Evidence` on the target and the machine of its trials."""
    environment, profile, machine = workload.environment, workload.profile, workload.machine
    found: dict[str, Any] = {
        "n_parameters": workload.n_parameters,
        "n_blocks": workload.n_blocks,
        "device_name": environment.device_name,
    }
    own = Candidate.of(candidate)
    if (data := workload.data) is not None:
        found |= {"lengths": data.table, "loader": data.loader, "data_cannot": data.cannot}
        found |= {"steps_grouped": data.steps_grouped}
    if profile is not None and not profile.guessed:
        # Ranks of an expert group update their own experts; from stage 1 on all ranks share the update of all weights.
        others = 0.0 if own.zero_stage else profile.n_expert * (1 - 1 / own.expert_degree)
        updated = max(0.0, profile.n_trainable - others)
        found["optimizer_bytes"] = (STEP_BYTES + 2.0 * profile.optimizer_bytes) * updated
        knobs, batch = Knobs.of([own]), own.global_batch_size(workload.data_parallel(world_size))
        length = float(profile.usual_share(knobs.micro, knobs.packed, knobs.limits)[0])  # of the profiled one
        found["flops_per_step"] = profile.flops_per_sample * length * batch
    probed, reached = profile_cache.load(Probe, profile_cache.machine_key(world_size)), machine.flops if machine else {}
    if probed is not None and probed.device_name == environment.device_name:
        machine, reached = probed.machine, {**probed.machine.flops, **probed.flops}
    if machine is None or not machine.measured:
        return found
    found["peak_flops"] = reached.get(own.precision, reached["fp32"])
    if profile is not None and profile.passes:
        _, terms = cost_terms([replace(own, checkpoint_every=0)], profile, machine)
        parts = {"products": "compute", "traffic": "traffic", "launches": "launches"}
        found["expected_s"] = {name: float(terms[term][0]) for name, term in parts.items()}
    return found


def _alone(result: TrialResult) -> StepObservation:
    return StepObservation(
        trial=0,
        candidate=result.candidate,
        samples_per_s=None,
        outcome=str(result.outcome),
        phases_s=result.phase_times_s,
    )


def traces(path: Path, world_size: int) -> dict[int, Traced]:
    """What the traced steps of a trial showed, by rank."""
    found = reports(TrialDir(path), world_size)
    return {rank: report.traced for rank, report in found.items() if report.traced is not None}


def phases(path: Path, world_size: int) -> dict[int, Mapping[str, float]]:
    """The step that each rank of a trial took apart, where it did."""
    found = reports(TrialDir(path), world_size)
    return {rank: report.phase_times_s for rank, report in found.items() if report.phase_times_s}


def step_parts(result: TrialResult, path: Path, n_blocks: int) -> dict[str, Part]:
    """The parts of a trial's step by name, the measured ones; empty where its phases were not timed."""
    ranks = phases(path, result.world_size)
    if not ranks:
        return {}
    found = diagnose(Evidence(seen=_alone(result), world_size=result.world_size, ranks=[ranks], n_blocks=n_blocks), [])
    return {part.name: part for part in found.parts if part.seconds is not None}


def busy_s(path: Path, world_size: int) -> dict[int, float]:
    """Seconds of the step that was taken apart in which each rank ran by itself, not waiting for other ranks."""
    return {
        rank: sum(found.get(name, 0.0) for name in ("script", "data", "forward", "backward"))
        for rank, found in phases(path, world_size).items()
    }


def as_data(report: StudyReport, found: Diagnosis, folder: Path) -> dict[str, Any]:
    """A diagnosis for programs, with what a trace showed by rank, where there is one."""
    row = next(row for row in report.trials if row["trial"] == found.trial)
    path = tracing.path_in(folder, found.trial)
    traced = {
        str(rank): {**asdict(each), "file": str(path / each.file)}
        for rank, each in traces(path, report.world_size).items()
    }
    return {"study": report.name, "candidate": row["candidate"], **asdict(found), "traced": traced}


def lines(report: StudyReport, found: Diagnosis) -> Iterator[str]:
    """A diagnosis for a terminal."""
    row = next(row for row in report.trials if row["trial"] == found.trial)
    marks = ", ".join(report.mark(found.trial))
    yield f"trial {found.trial}: {words(row['candidate'])}" + (f" ({marks})" if marks else "")
    yield f"bound by {found.bound_by}" if found.bound_by else "what bounds it is not known"
    yield ""
    scale = metric_scale("step_time_s", [part.seconds for part in found.parts if part.seconds])
    cells = [("part of the step", "share", scale.unit, "how it is known")]
    for part in found.parts:
        share = "-" if part.share is None else f"{part.share:.0%}" if part.share >= 0.005 else "0%"
        cells.append((part.name, share, "-" if part.seconds is None else scale.number(part.seconds), part.known))
    yield from (f"  {line}" for line in aligned(cells, left={0, 3}))
    yield ""
    if found.advice:
        yield "What the study's other trials say about the knobs that matter here:"
        yield from (f"  - {_advice(each)}" for each in found.advice[:8])
    elif found.bound_by:
        yield "No other trial of this study says that another value of the knobs that matter here would be faster."
    yield from (f"note: {note}" for note in found.notes)


def trace_lines(folder: Path, number: int, world_size: int) -> Iterator[str]:
    """What the trace of a trial showed, and where it lies; nothing where there is none."""
    path = tracing.path_in(folder, number)
    found = traces(path, world_size)
    if not found:
        return
    first = found[min(found)]
    whole = sum(first.spans_s.values()) or 1.0
    yield ""
    yield f"Where {first.n_steps} traced steps went, in operations of rank {min(found)}:"
    for each in first.operations:
        yield f"  {each.seconds / whole:>4.0%} {each.seconds * 1e3:>9,.2f} ms  {each.calls:>7,.0f} x  {each.name}"
    yield ""
    yield "Traces, for https://ui.perfetto.dev or chrome://tracing:"
    yield from (f"  {path / each.file}" for each in found.values())


def _advice(each: Advice) -> str:
    change = f"{each.knob} {level_text(each.value)} instead of {level_text(each.before)}"
    return f"{change}: {times(each.factor)} the throughput ({each.why})"
