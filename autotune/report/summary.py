"""What a study found, read from its database and folder, and the files that it leaves behind."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from optuna.study import Study

from autotune import files, store, trial
from autotune.analysis import recommend
from autotune.analysis.recommend import Measured, Recommendation
from autotune.candidate import Candidate, DsConfig
from autotune.convergence import RATE_KEYS
from autotune.objective import METRICS
from autotune.report import StudyReport, readme
from autotune.report import export as exports
from autotune.report.export import (
    RATE_FLAG,
    Exported,
    Started,
    deepspeed_config,
    learning_rate_changes,
    script_side_changes,
    training_rate,
)
from autotune.store import StoreError, StudyRecord
from autotune.trial import TRAINER, Outcome, TrialResult


def load(name: str, storage_url: str, folder: Path) -> StudyReport:
    """Reads a study and works out what it found so far.

    Args:
        name: The study.
        storage_url: Its database.
        folder: Its folder.

    Raises:
        StoreError: There is no such database or study, or autotune did not make it.
    """
    storage = store.open_storage(storage_url, create=False)
    study = store.load_study(storage, name)
    later = store.current(study)
    if later == name:
        return read(study, folder)
    generation = store.generation_of(later)[1]
    found = read(store.load_study(storage, later), folder / "retunes" / f"{generation:04d}")
    return replace(found, study={**found.study, "name": name})


def read(study: Study, folder: Path, *, series: bool = True) -> StudyReport:
    """Works out what a study found so far.

    Args:
        study: The study.
        folder: Its folder.
        series: Read the losses and the times of single steps too, which takes opening a file for each trial.

    Raises:
        StoreError: autotune did not make it.
    """
    name, kept = study.study_name, store.record(study)
    if kept is None:
        raise StoreError(f"study {name!r} in this database was not made by autotune, or holds no trial yet")
    measured = [_with_changes(m, kept) for m in store.measured(study, folder, kept)]
    baseline = next((m for m in measured if m.trial == 0 and m.outcome is Outcome.COMPLETE), None)
    found = recommend.recommend(measured, baseline, kept.objectives, kept.data_parallel)
    trials = _trials(study, measured, folder if series else None)
    return StudyReport(
        study={
            "name": name,
            "stored_as": name,
            "folder": str(folder),
            "target": kept.target,
            "ranks": kept.world_size,
            "data_parallel": kept.data_parallel,
            "objectives": [o.metric for o in kept.objectives],
            "weights": {o.metric: o.weight for o in kept.objectives},
            "n_trials": len(trials),
            "wall_s": sum(t["wall_s"] for t in trials),
            "base_config": kept.base_config,
            "threads_per_rank": _threads(kept),
            "baseline": Candidate.from_key(kept.baseline).values(),
            "ended": study.user_attrs.get(store.ENDED_ATTR, ""),
        },
        environment=asdict(kept.workload.environment),
        workload=asdict(kept.workload),
        invocation=kept.invocation,
        recommended=_recommended(found),
        front=[recommend.point(m) for m in found.front],
        trials=trials,
    )


def _threads(kept: StudyRecord) -> int | None:
    """Threads of a rank on a CPU, where another number of them is another speed."""
    environment = kept.workload.environment
    if environment.accelerator != "cpu":
        return None
    return trial.threads_per_rank(environment.n_cores, kept.world_size, environment.omp_num_threads)


def _with_changes(measured: Measured, kept: StudyRecord) -> Measured:
    baseline = Candidate.from_key(kept.baseline)
    point = {"candidate": measured.candidate.values(), "ds_config": measured.ds_config}
    script = kept.workload.script
    return replace(
        measured,
        ds_config=deepspeed_config(point, kept.base_config),
        script_side_changes=[
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
    return any(isinstance(found.get(key), int | float) and found[key] for found in params for key in RATE_KEYS)


def _as_seen_outside(candidate: Candidate, kept: StudyRecord) -> Candidate:
    """The candidate without what the JSON alone does: a pipeline recomputes as its own section says."""
    pipeline = kept.workload.script is not None and kept.workload.script.pipeline_stages > 0
    own = Candidate.from_key(kept.baseline).checkpoint_every
    return replace(candidate, checkpoint_every=own) if pipeline else candidate


def _recommended(found: Recommendation) -> dict[str, Any]:
    return {
        "picks": {name: pick.to_data() for name, pick in found.picks.items()},
        "baseline": found.baseline.to_data() if found.baseline else None,
    }


def _trials(study: Study, measured: list[Measured], folder: Path | None) -> list[dict[str, Any]]:
    rows = []
    for told, seen in zip(store.told_trials(study), measured, strict=True):
        data = store.told_data(told)
        result = trial.result_in(store.trial_path(folder, told.number)) if folder else None
        rows.append(
            {
                "trial": told.number,
                "role": told.user_attrs.get(store.ROLE_ATTR, "search"),
                "outcome": str(seen.outcome),
                "reason": seen.verdict.reason
                if seen.verdict is not None and seen.verdict.passed is False
                else data["reason"],
                "phase": data["phase"],
                "candidate": seen.candidate.values(),
                "metrics": data["metrics"],
                "ci95": data["ci95"],
                "censored": data["censored"],
                "feasible": data["feasible"],
                "wall_s": data["wall_s"],
                "caveats": data["caveats"],
                "phase_times_s": data.get("phase_times_s", {}),
                "forecast": data.get("forecast", {}),
                "gate": asdict(seen.verdict) if seen.verdict is not None and folder else None,
                "losses": _curve(result, seen, folder),
                "step_times_s": result.step_times_s if result else [],
                "n_warmup": result.steps.n_warmup if result and result.steps else None,
            }
        )
    return rows


def _curve(result: TrialResult | None, seen: Measured, folder: Path | None) -> list[float | None]:
    """A trial's losses; those of its second run where the quality gate needed a longer one."""
    longer = (
        trial.result_in(store.trial_path(folder, seen.trial) / "gate") if folder and seen.verdict is not None else None
    )
    shown = longer or result
    return shown.losses if shown is not None else []


def write(report: StudyReport, folder: Path) -> list[Path]:
    """Writes the study's files, each whole or not at all.

    Returns:
        Their paths, the one that people want first.
    """
    from autotune.report import html  # plotly takes a third of a second to import

    picks = report.recommended["picks"]
    trial.write(folder / "environment.json", report.environment)
    trial.write(folder / "front.json", report.front)
    trial.write(folder / "recommended.json", report.recommended)
    files.write_text(folder / "README.md", readme.render(report))
    html.write(report, folder / "report.html")
    written = [
        folder / name for name in ("recommended.json", "front.json", "README.md", "report.html", "environment.json")
    ]
    if "recommended" in picks:
        trial.write(folder / "ds_config.json", picks["recommended"]["ds_config"])
        written.insert(0, folder / "ds_config.json")
    return written


def export(report: StudyReport, pick: str | None, number: int | None, form: str) -> Exported:
    """A pick, or any trial, in the form that another tool takes.

    Args:
        report: The study.
        pick: Name of the pick; None for `recommended`.
        number: A trial instead of a pick.
        form: One of those that `report.export` knows.

    Raises:
        UserError: There is no such pick, trial or format.
    """
    chosen, base = pick_or_trial(report, pick, number), report.study["base_config"]
    text = exports.export(chosen, base, form, report.world_size, started(report))
    changes = [] if form == "command" else chosen.get("script_side_changes", [])  # its comments say so
    return Exported(text=text, notes=[*exports.notes(chosen, base, form), *changes])


def started(report: StudyReport) -> Started | None:
    """How the study's script is started; None where a model.py was tuned."""
    script = report.workload.get("script")
    if report.invocation is None or not script:
        return None
    return Started(
        invocation=report.invocation,
        flags=script["flags"],
        config_source=script["config_source"],
        baseline=report.study["baseline"],
    )


def status_data(report: StudyReport, n_running: int) -> dict[str, Any]:
    """How far a study is, for programs."""
    outcomes: dict[str, int] = {}
    for row in report.trials:
        outcomes[row["outcome"]] = outcomes.get(row["outcome"], 0) + 1
    picks = report.recommended["picks"]
    study = {name: value for name, value in report.study.items() if name not in ("base_config", "baseline", "folder")}
    return {
        **study,
        "outcomes": outcomes,
        "running": n_running,
        "recommended": picks.get("recommended"),
        "drop_in": picks.get("drop_in"),
    }


def metric_rows() -> list[tuple[str, str, str, str]]:
    """Name, unit, direction and label of every metric."""
    return [(name, metric.unit, metric.direction, metric.label) for name, metric in METRICS.items()]


def pick_or_trial(report: StudyReport, pick: str | None, number: int | None) -> dict[str, Any]:
    """The point to export.

    Raises:
        StoreError: There is no such pick or trial; it lists those there are.
    """
    if number is not None:
        row = next((row for row in report.trials if row["trial"] == number), None)
        if row is None:
            numbers = [row["trial"] for row in report.trials]
            raise StoreError(
                f"study {report.study['name']!r} has no told trial {number}; it has {min(numbers)} to {max(numbers)}"
                if numbers
                else "it has none"
            )
        every = [*report.recommended["picks"].values(), *report.front]
        known = next((p for p in every if p["trial"] == number), None)
        return dict(known or row)
    picks = report.recommended["picks"]
    name = pick or "recommended"
    if name == "baseline" and report.recommended["baseline"]:
        return dict(report.recommended["baseline"])
    if name not in picks:
        known_names = ", ".join([*picks, *(["baseline"] if report.recommended["baseline"] else [])])
        raise StoreError(
            f"study {report.study['name']!r} has no pick {name!r}. Known: {known_names or 'none, since no trial completed'}"
        )
    return dict(picks[name])
