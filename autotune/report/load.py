"""Reads a study from its database and folder and works out what it found, as a `StudyReport`."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from optuna.study import Study

from autotune.report.data import Data, StudyReport
from autotune.report.export import RATE_FLAG, deepspeed_config, training_rate
from autotune.report.script_changes import learning_rate_changes, script_side_changes
from autotune.report.timeline import changed_ns, runs
from autotune.scoring import recommend
from autotune.scoring.estimates import Estimates, estimate
from autotune.scoring.measured import Measured
from autotune.space.candidate import Candidate
from autotune.space.deepspeed import RATE_KEYS, DsConfig
from autotune.study.folder import retuning_path, trial_path
from autotune.study.lock import run_under_way
from autotune.study.storage import analysed, database, records
from autotune.study.storage.database import Storage, StoreError
from autotune.study.storage.generations import generation_of
from autotune.study.storage.history import History
from autotune.study.storage.records import StudyRecord
from autotune.trial import workload
from autotune.trial.folder import TrialDir, result_in
from autotune.trial.result import Outcome, TrialResult
from autotune.trial.workload import TRAINER

# What a trial's row takes from its stored result.
TOLD = (
    "reason", "phase", "censored", "feasible", "wall_s", "caveats", "phase_times_s", "forecast", "tail", "padding",
)  # fmt: skip
# Where it ran, which its file alone tells.
WHERE = ("hosts", "machine", "waited_s", "lost_attempts")


def load(name: str, storage_url: str, folder: Path) -> StudyReport:
    """Reads a study and works out what it found so far.

    Raises:
        StoreError: There is no such database or study, or autotune did not make it.
    """
    return from_storage(database.open_storage(storage_url, create=False), name, folder)


def from_storage(storage: Storage, name: str, folder: Path, *, today: bool = True) -> StudyReport:
    """Works out what a study in an open database found so far.

    Args:
        today: Of a study whose answer a re-tuning has replaced, read that re-tuning's.

    Raises:
        StoreError: There is no such study, or autotune did not make it.
    """
    study = records.load_study(storage, name)
    later = records.current(study) if today else name
    if later == name:
        found = read(study, folder)
    else:
        where = retuning_path(folder, generation_of(later)[1])
        found = read(records.load_study(storage, later), where)
    under_way = _is_under_way(folder)
    retuned = under_way and History(storage.engine).interrupted(name) is not None
    own = {"name": name, "folder": str(folder), "under_way": under_way, "retuned": retuned}
    return replace(found, study={**found.study, **own})


def read(study: Study, folder: Path, *, series: bool = True) -> StudyReport:
    """Works out what a study found so far.

    Args:
        series: Read the losses and the times of single steps too, which takes opening a file for each trial.

    Raises:
        StoreError: autotune did not make it, or it holds no trial.
    """
    with records.snapshot(study):  # a trial that ends meanwhile is in all parts of the report, or in none
        return _read(study, folder, series=series)


def _read(study: Study, folder: Path, *, series: bool) -> StudyReport:
    name, kept = study.study_name, records.record(study)
    if kept is None:
        raise StoreError(f"study {name!r} in this database was not made by autotune, or holds no trial yet")
    raw = analysed.measured(study, folder, kept)
    if not raw:  # its run was killed before the baseline's trial was told
        raise StoreError(f"study {name!r} holds no trial yet; the command that began it begins it anew")
    estimates = estimate([_with_changes(m, kept) for m in raw])
    found = recommend.recommend(estimates, kept.objectives, kept.data_parallel)
    trials = [_dropped_in(row, kept) for row in _trials(study, estimates, folder, series=series)]
    if (best := found.picks.get("recommended")) is not None:
        for row, seen in zip(trials, estimates.measured, strict=True):
            others = seen.outcome is Outcome.COMPLETE and seen.trial != best.measured.trial
            row["tied"] = others and recommend.tied(seen, best.measured, estimates, kept.objectives)
    recommended: dict[str, Any] = {
        "picks": {name: _dropped_in(pick.to_data(), kept) for name, pick in found.picks.items()},
        "baseline": _dropped_in(found.baseline.to_data(), kept) if found.baseline else None,
    }
    report = StudyReport(
        study=_facts(study, kept, folder, n_trials=len(trials)) | {"deepspeed_added": _adds_deepspeed(raw)},
        environment=asdict(kept.workload.environment),
        workload=asdict(kept.workload),
        invocation=kept.invocation,
        recommended=recommended,
        front=[_dropped_in(recommend.point(m, estimates), kept) for m in found.front],
        trials=trials,
        runs=runs(folder),
    )
    if not found.picks:
        recommended["why_nothing"] = report.why_nothing
    return report


def _dropped_in(point: Data, kept: StudyRecord) -> dict[str, Any]:
    """A point with its configuration as the script's framework reads it."""
    family = kept.workload.script.family if kept.workload.script else ""
    return {**point, "ds_config": deepspeed_config(point["ds_config"], kept.base_config, family)}


def _facts(study: Study, kept: StudyRecord, folder: Path, *, n_trials: int) -> dict[str, Any]:
    """What is known of a study besides its trials, as `StudyReport.study` has it."""
    stated = records.STATED.of(study)
    return {
        "name": study.study_name,
        "stored_as": study.study_name,
        "folder": str(folder),
        "stored_in": str(folder),
        "replaced_by": later if (later := records.current(study)) != study.study_name else "",
        "target": kept.target,
        "ranks": kept.world_size,
        "nodes": _nodes(kept),
        "data_parallel": kept.data_parallel,
        "objectives": [o.metric for o in kept.objectives],
        "weights": {o.metric: o.weight for o in kept.objectives},
        "goal": kept.goal,
        "n_trials": n_trials,
        "wall_s": records.WALL_S.of(study),
        "unchecked_s": records.UNCHECKED_S.of(study),
        "left_out": [said for said in records.LEFT_OUT.of(study).values() if said],
        "base_config": Candidate.from_key(kept.baseline).with_own(kept.base_config),
        "threads_per_rank": _threads(kept),
        "baseline": Candidate.from_key(kept.baseline).values(),
        "measured_on": _days(study),
        "trials_wanted": stated.get("trials"),
        **{name: stated.get(name) for name in records.WATCHED},
        "ended": study.user_attrs.get(records.ENDED_ATTR, ""),
        "under_way": _is_under_way(folder),
        "unreadable": records.unreadable(study),
        "lost": [{"trial": each.number, "reason": each.user_attrs.get("reason", "")} for each in records.lost(study)],
    }


def _is_under_way(folder: Path) -> bool:
    """Whether another process runs or re-tunes the study of a folder now."""
    return run_under_way(folder) not in (None, os.getpid())


def _days(study: Study) -> list[str]:
    """The days on which the first and the last trial ended, in local time."""
    ended = sorted(told.datetime_complete for told in records.told_trials(study) if told.datetime_complete)
    return [f"{ended[0]:%Y-%m-%d}", f"{ended[-1]:%Y-%m-%d}"] if ended else []


def _adds_deepspeed(measured: Sequence[Measured]) -> bool:
    """Whether the script runs without DeepSpeed, so that its baseline is one with it."""
    return any(text.startswith("DeepSpeed:") for m in measured if m.trial == 0 for text in m.script_side_changes)


def _threads(kept: StudyRecord) -> int | None:
    """Threads of a rank on a CPU, where another number of them is another speed."""
    environment = kept.workload.environment
    if environment.accelerator != "cpu":
        return None
    return workload.threads_per_rank(environment.n_cores, kept.world_size // _nodes(kept), environment.omp_num_threads)


def _nodes(kept: StudyRecord) -> int:
    """Machines of a trial: what cannot be spread evenly over those of the study ran on one."""
    stated: int = kept.fingerprint.get("nodes", 1)
    return 1 if kept.world_size % stated else stated


def _with_changes(measured: Measured, kept: StudyRecord) -> Measured:
    baseline = Candidate.from_key(kept.baseline)
    script = kept.workload.script
    return replace(
        measured,
        ds_config=deepspeed_config(measured.ds_config, kept.base_config),
        # The user's own configuration takes no change, though it was measured with DeepSpeed (see `caveats`).
        script_side_changes=[]
        if measured.candidate == baseline
        else [
            *measured.script_side_changes,
            *script_side_changes(
                _as_seen_outside(measured.candidate, kept),
                baseline,
                kept.workload.block_class,
                is_script=script is not None,
                family=script.family if script else "",
            ),
            *_rate_changes(measured, baseline, kept),
        ],
    )


def _rate_changes(measured: Measured, baseline: Candidate, kept: StudyRecord) -> list[str]:
    if any(text.startswith("Learning rate:") for text in measured.script_side_changes):
        return []  # the script moves it too, and its trial has seen how far
    by_trainer = kept.workload.script is not None and kept.workload.script.family == TRAINER
    rate = training_rate(measured.ds_config) if by_trainer else None
    flag = f"{RATE_FLAG} {rate}" if rate is not None else ""
    return learning_rate_changes(
        measured.candidate, baseline, kept.learning_rate, in_json=_states_rate(measured.ds_config), flag=flag
    )


def _states_rate(config: DsConfig) -> bool:
    """Whether a DeepSpeed configuration says what the learning rate is."""
    params = [(config.get(section) or {}).get("params") or {} for section in ("optimizer", "scheduler")]
    return any(isinstance(found.get(key), int | float | list) and found[key] for found in params for key in RATE_KEYS)


def _as_seen_outside(candidate: Candidate, kept: StudyRecord) -> Candidate:
    """The candidate without what the JSON alone does: a pipeline recomputes as its own section says."""
    script = kept.workload.script
    pipeline = kept.workload.pipeline is not None or (script is not None and script.pipeline_stages > 0)
    own = Candidate.from_key(kept.baseline).checkpoint_every
    return replace(candidate, checkpoint_every=own) if pipeline else candidate


def _trials(study: Study, estimates: Estimates, folder: Path, *, series: bool) -> list[dict[str, Any]]:
    rows = []
    for told, seen in zip(records.told_trials(study), estimates.measured, strict=True):
        data, verdict = records.told_data(told), seen.verdict
        path = trial_path(folder, told.number)
        result = result_in(path) if series else None
        row: dict[str, Any] = {"trial": told.number, "role": told.user_attrs.get(records.ROLE_ATTR, "search")}
        row |= {"outcome": str(seen.outcome), "candidate": seen.candidate.values(), "ds_config": seen.ds_config}
        row |= {name: data[name] for name in TOLD} | {"log_slowdown": data.get("log_slowdown")}
        row |= {"feasible": seen.feasible, "unreproducible": list(seen.unreproducible)}
        row |= {"unwitnessed": list(seen.unwitnessed), "failed_again": seen.failed_again}
        row |= {"script_side_changes": list(seen.script_side_changes)}
        row |= recommend.figures(seen, estimates) | {"readings_s": _readings(estimates.raw[told.number])}
        if verdict is not None and verdict.passed is False:
            row["reason"] = verdict.reason
        curve = _with_curve(result, seen, path) if series else None
        row |= {
            "gate": asdict(verdict) if verdict is not None else None,
            "losses": curve.losses if curve is not None else [],
            "losses_batch": seen.verdict.batch if curve is not result and seen.verdict is not None else None,
            "step_times_s": result.step_times_s if result else [],
            "n_warmup": result.steps.n_warmup if result and result.steps else None,
        }
        row |= _where(path, changed_ns(TrialDir(path).result)) if result is None else _where_of(result)
        rows.append(row)
    return rows


def _readings(raw: Measured) -> list[float]:
    """The step times that a trial and its re-measurements read, before anything was estimated from them."""
    every = (raw.metrics, *raw.repeats.values())
    return [found["step_time_s"] for found in every if "step_time_s" in found]


@lru_cache(maxsize=20_000)  # the dashboard reads a study every ten seconds
def _where(path: Path, _changed_ns: int) -> dict[str, Any]:
    """Where the trial in a folder ran, and what that cost; empty where nothing tells."""
    return _where_of(result) if (result := result_in(path)) is not None else {}


def _where_of(result: TrialResult) -> dict[str, Any]:
    return {name: getattr(result, name) for name in WHERE}


def _with_curve(result: TrialResult | None, seen: Measured, path: Path) -> TrialResult | None:
    """The run of a trial whose losses are shown: its second one where the quality gate needed a longer or another curve."""
    longer = result_in(path / "gate") if seen.verdict is not None else None
    return longer or result


def status_data(report: StudyReport, n_running: int) -> dict[str, Any]:
    """How far a study is, for programs."""
    picks = report.recommended["picks"]
    left_out = ("base_config", "baseline", "folder", "stored_in")
    study = {name: value for name, value in report.study.items() if name not in left_out}
    return {
        **study,
        "outcomes": dict(Counter(row["outcome"] for row in report.trials)),
        "running": n_running,
        "recommended": picks.get("recommended"),
        "drop_in": picks.get("drop_in"),
    }
