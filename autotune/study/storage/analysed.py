"""A study's trials as the analysis takes them: with their re-measurements, their checks, and what the model foretells of them."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from optuna.study import Study
from optuna.trial import FrozenTrial

from autotune.forecast.predictor import generic_prior
from autotune.scoring.convergence.branch import Branch
from autotune.scoring.convergence.quality_gate import GateVerdict, trains_alike
from autotune.scoring.convergence.time_to_loss import Reference
from autotune.scoring.measured import Foretold, Measured
from autotune.scoring.metrics import remeasured
from autotune.search.observation import MEASURED_ATTR, as_usual, observed
from autotune.search.optimizer import CandidateOptimizer
from autotune.search.physics import PhysicsSampler
from autotune.space.candidate import Candidate
from autotune.space.deepspeed import DsConfig
from autotune.space.space import SearchSpace
from autotune.study.folder import branch_path, gate_path, repeat_paths, trial_path
from autotune.study.storage import records
from autotune.study.storage.records import StudyRecord, told_candidate, told_data
from autotune.trial.folder import ran, record_in, result_in
from autotune.trial.result import RAN, Outcome

PEAK = "peak_memory_bytes"
# Between two trials a machine whose load comes and goes may be another one after this time.
PAUSE_S = 300.0


@dataclass
class Reading:
    """What one reading of a study's trials leaves for the next one.

    Attributes:
        trials: Those that were read, by number; None while trials are measured again, since their files change.
        foretold: From what each of them was last foretold, and what was.
        whole: All that the reading was made of, and what it found; only while no trial is measured again.
    """

    trials: dict[int, Measured] | None = None
    foretold: tuple[Any, list[Foretold | None]] | None = None
    whole: tuple[list[FrozenTrial], StudyRecord, list[Measured]] | None = None


def measured(study: Study, folder: Path, kept: StudyRecord, before: Reading | None = None) -> list[Measured]:
    """Every told trial of a study with its re-measurements.

    Args:
        before: What an earlier reading left, to which this one adds; None reads everything.
    """
    before = Reading() if before is None else before
    told, own = records.told_trials(study), kept.ds_config(Candidate.from_key(kept.baseline))
    if before.whole is not None and before.whole[1] == kept and _are_same(before.whole[0], told):
        return list(before.whole[2])
    seen = {} if before.trials is None else before.trials
    seen |= {each.number: _as_measured(each, folder, kept, own) for each in told if each.number not in seen}
    known = zip(told, _foretold(kept, told, before), _sittings(told, folder, kept), strict=True)
    found = [replace(seen[each.number], forecast=forecast, sitting=sitting) for each, forecast, sitting in known]
    most = max((m.loss_off for m in found), key=abs, default=0.0)
    if most or kept.workload.by_micro_batch:
        found = _apart_by_micro_batch(found, Candidate.from_key(kept.baseline), most)
    if before.trials is not None:
        before.whole = told, kept, found
    return list(found)


def _are_same(some: Sequence[FrozenTrial], others: Sequence[FrozenTrial]) -> bool:
    """Whether these are the very same trials; one that has ended stays the same object in Optuna's cache."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _apart_by_micro_batch(found: Sequence[Measured], baseline: Candidate, most: float) -> list[Measured]:
    """The trials of a study whose loss depends on the micro-batch: another one than the baseline's is other numerics.

    Args:
        most: How far off the first losses of one of them are at most.
    """
    apart = [replace(m, loss_micro_batch=m.candidate.micro_batch_size) for m in found]
    return [
        replace(m, loss_off=m.loss_off or most, numerics_kept=False)
        if m.loss_micro_batch != baseline.micro_batch_size
        else m
        for m in apart
    ]


def search_of(study: Study, folder: Path, kept: StudyRecord) -> tuple[SearchSpace, PhysicsSampler]:
    """The space that a study searches, and the sampler that judges its candidates, by what its checks refused, too."""
    search, weights = kept.search, {each.metric: each.weight for each in kept.objectives}
    where = f"study {study.study_name}"
    space = replace(SearchSpace.stored(search.space, where), samples_per_rank=search.samples_per_rank)
    sampler = PhysicsSampler(
        space, Candidate.from_key(kept.baseline), search.setting, 0, prior=generic_prior(kept.workload, search.setting),
        metrics=weights, memory_limit_bytes=search.memory_limit_bytes, bounds=search.bounds,
    )  # fmt: skip
    told, own = records.told_trials(study), kept.ds_config(Candidate.from_key(kept.baseline))
    sampler.later = measured_later(told)
    sampler.refused = {each.number for each in told if _as_measured(each, folder, kept, own).refused}
    return space, sampler


def measured_later(told: Sequence[FrozenTrial]) -> dict[int, str]:
    """The result of the baseline by its number, as JSON: of one that crashed at first, what it measured later."""
    return {each.number: each.system_attrs[MEASURED_ATTR] for each in told[:1] if not each.number}


def _sittings(told: Sequence[FrozenTrial], folder: Path, kept: StudyRecord) -> list[int]:
    """How many pauses came before each trial; on a CPU, whose load by others comes and goes, and not on devices of the study's own."""
    if kept.workload.environment.accelerator != "cpu":
        return [0] * len(told)
    found, n, ended_s = dict[int, int](), 0, math.inf
    # The probe of the noise scale follows the baseline, and is no pause. Dates have no time zone: it is compared with the baseline's run.
    own, probe = ran(trial_path(folder, 0)), ran(folder / "trials" / "noise")
    probe_s = sum(probe) - sum(own) if own is not None and probe is not None else 0.0
    # A baseline may have been measured after others.
    for each in sorted(told, key=lambda each: each.datetime_complete or datetime.max):
        at_s = each.datetime_complete.timestamp() if each.datetime_complete is not None else ended_s
        n += at_s - told_data(each)["wall_s"] - ended_s > PAUSE_S
        found[each.number] = n
        ended_s = at_s if math.isinf(ended_s) else max(ended_s, at_s)
        if not each.number:
            ended_s = max(ended_s, at_s + probe_s)
    return [found[each.number] for each in told]


def _foretold(kept: StudyRecord, told: Sequence[FrozenTrial], before: Reading) -> list[Foretold | None]:
    """What the search's model of all trials foretells of each one, whatever proposed them."""
    setting, limit = kept.search.setting, kept.search.memory_limit_bytes
    seen = as_usual([observed(told_candidate(each), told_data(each), setting) for each in told])
    inputs = seen, kept.workload, setting, limit, kept.baseline
    foretold = before.foretold
    if foretold is None or foretold[0] != inputs:
        guide = CandidateOptimizer(
            [each.candidate for each in seen], generic_prior(kept.workload, setting), ["step_time_s"],
            world_size=setting.world_size, memory_limit_bytes=limit, reference=Candidate.from_key(kept.baseline),
        )  # fmt: skip
        foretold = before.foretold = inputs, guide.foretold(seen)
    return foretold[1]


def _as_measured(told: FrozenTrial, folder: Path, kept: StudyRecord, own: DsConfig) -> Measured:
    data, candidate = told_data(told), told_candidate(told)
    paths = repeat_paths(folder, told.number)
    ds_config, verdict = kept.ds_config(candidate), record_in(gate_path(folder, told.number), GateVerdict)
    baseline = Candidate.from_key(kept.baseline)
    refused = verdict is not None and verdict.passed is False
    beside = repeat_paths(folder, 0) if told.number and paths else {}
    repeats, tail_peaks = _repeated(paths, beside, candidate, kept.reference)
    unfit, failed_again = _failures(paths.values(), candidate)
    if data.get("tail"):  # the memory of a run without the worst batch does not compare
        for values in (values for n, values in repeats.items() if n not in tail_peaks):
            values.pop(PEAK, None)
    loads = {0: data.get("log_slowdown")}
    loads |= {n: result.log_slowdown for n, path in paths.items() if (result := result_in(path)) is not None}
    # Evaluation or a checkpoint is tried when it is measured again alone: the trial's own reading does not compare.
    more = {PEAK: max(tail_peaks.values())} if tail_peaks and not data.get("tail") else {}
    return Measured(
        trial=told.number,
        candidate=candidate,
        ds_config=ds_config,
        outcome=Outcome.DIVERGED if refused else Outcome(data["outcome"]),
        verdict=verdict,
        branch=record_in(branch_path(folder, told.number), Branch),
        branch_wanted=kept.branches
        and candidate.global_batch_size(kept.data_parallel) != baseline.global_batch_size(kept.data_parallel),
        numerics_kept=trains_alike(candidate, baseline, ds_config, own, kept.workload),
        metrics=data["metrics"] | more,
        ci95={name: (low, high) for name, (low, high) in data["ci95"].items() if name not in more},
        feasible=data["feasible"],
        bounds=kept.search.bounds,
        repeats=repeats,
        unfit=unfit,
        failed_again=failed_again,
        script_side_changes=data.get("side_changes", ()),
        unreproducible=data.get("unreproducible", ()),
        unwitnessed=data.get("unwitnessed", ()),
        loss_off=data.get("loss_off", 0.0),
        log_slowdown={n: load for n, load in loads.items() if load is not None},
    )


def _repeated(
    paths: Mapping[int, Path], beside: Mapping[int, Path], candidate: Candidate, reference: Reference | None
) -> tuple[dict[int, dict[str, float]], dict[int, float]]:
    """The metrics of each complete re-measurement, by round; and the peak memory of those that tried a worst batch, or more.

    Args:
        beside: The baseline's in the same rounds: on other machines than these a time says nothing.
    """
    found, peaks = dict[int, dict[str, float]](), dict[int, float]()
    for n, path in paths.items():
        result, base = result_in(path), result_in(beside[n]) if n in beside else None
        if result is None or result.outcome is not Outcome.COMPLETE or result.candidate != candidate.values():
            continue
        if base is not None and base.place and result.place and base.place != result.place:
            continue
        found[n] = remeasured(result, reference)
        checked = result.tail or {"evaluate", "save"} & result.memory_by_phase_bytes.keys()
        if checked and PEAK in found[n]:
            peaks[n] = found[n][PEAK]
    return found, peaks


def _failures(paths: Iterable[Path], candidate: Candidate) -> tuple[str, str]:
    """Why a re-measurement shows that it does not fit, and how one failed before its tail check; empty if none did."""
    results = [r for path in paths if (r := result_in(path)) is not None and r.candidate == candidate.values()]
    # What runs out of memory in one run of two does so in a training; a crash may be chance.
    again = "it ran out of memory when it was measured again"
    unfit = (r.reason if r.failed_check else again for r in results if r.failed_check or r.outcome is Outcome.OOM)
    failed = (r.end for r in results if r.outcome not in RAN and not r.failed_check)
    return next(unfit, ""), next(failed, "")
