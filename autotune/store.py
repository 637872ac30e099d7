"""What a study keeps in the database: its record, what its trials were told, and how both are read back."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState
from pydantic import TypeAdapter, ValidationError

from autotune import database, history, masking, objective, trial
from autotune.analysis.recommend import Measured
from autotune.branch import Branch
from autotune.candidate import CANDIDATE_ATTR, Candidate, DsConfig, Setting
from autotune.convergence import LearningRate
from autotune.database import Cached, Storage
from autotune.gate import Verdict, numerics
from autotune.invocation import Invocation
from autotune.objective import Direction, Objective, Reference
from autotune.spec import StudySpec, check_name
from autotune.trial import Outcome, Workload

# Whoever uses the store opens it here, too.
PATIENCE_S, StoreError = database.PATIENCE_S, database.StoreError
open_storage, failing_in_words = database.open_storage, database.failing_in_words

MEASURED_ATTR, ROLE_ATTR, RECORD_ATTR, ENDED_ATTR = "measured", "role", "autotune", "ended"
SETTINGS_ATTR = "settings"
# Fields of a study that a run may change and that its helpers must know; the others are the same for all of its trials.
SETTINGS = (
    "trials",
    "sampler",
    "memory_filter",
    "stop_below",
    "stop_trials",
    "trial_budget_s",
    "trial_deadline_s",
    "min_samples",
)
# Kept beside them for whoever watches; a helper's time is its own.
WATCHED = ("time_budget_s",)
# Which re-tuning's study holds the answer of this one today.
SUCCESSOR_ATTR = "successor"
SQLITE = "sqlite:///"


def default_url(studies: Path) -> str:
    """The database beside the study folders."""
    return f"{SQLITE}{(studies / 'autotune.db').as_posix()}"


def study_names(storage: Storage) -> list[str]:
    """Names of the studies in the database, sorted."""
    return sorted(study.study_name for study in optuna.get_all_study_summaries(storage, include_best_trial=False))


def load_study(storage: Storage, name: str) -> Study:
    """The study of that name.

    Raises:
        StoreError: It is not there; the message lists those that are.
    """
    try:
        return optuna.load_study(study_name=name, storage=Cached(storage))
    except KeyError:
        names = study_names(storage)
        known = f"Known: {', '.join(names)}." if names else "There is none yet."
        raise StoreError(f"no study {name!r} in {storage.shown}. {known}") from None


def create_study(storage: Storage, name: str, directions: Sequence[Direction], metric_names: Sequence[str]) -> Study:
    """Makes the study, or opens it if it is there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        study = optuna.create_study(
            study_name=name, storage=Cached(storage), directions=list(directions), load_if_exists=True
        )
        study.set_metric_names(list(metric_names))
    return study


def delete_study(storage: Storage, name: str) -> None:
    """Removes a study with its trials, its re-tunings and its history; one that is not there is no error."""
    for own in [name, *(other for other in study_names(storage) if other != name and generation_of(other)[0] == name)]:
        with contextlib.suppress(KeyError):
            optuna.delete_study(study_name=own, storage=storage)
    history.forget(storage.engine, name)


def note_settings(study: Study, spec: StudySpec) -> None:
    """Keeps what a run was told of the budget and the search, for the coordinators that help it."""
    stated = {name: getattr(spec, name) for name in (*SETTINGS, *WATCHED)}
    if study.user_attrs.get(SETTINGS_ATTR) != stated:
        study.set_user_attr(SETTINGS_ATTR, stated)


def settings(study: Study) -> dict[str, Any]:
    """What the run that leads a study was told, by field of its `StudySpec`."""
    return {name: value for name, value in study.user_attrs.get(SETTINGS_ATTR, {}).items() if name in SETTINGS}


def still(study: Study, *, news: bool = True) -> contextlib.AbstractContextManager[None]:
    """Lets a block that looks at the trials many times see the same ones every time, for the price of one look.

    Args:
        study: The study.
        news: False shows the trials as they were last seen, for no look at all.
    """
    storage = study._storage
    return storage.still(study._study_id, news=news) if isinstance(storage, Cached) else contextlib.nullcontext()


def running(study: Study) -> list[FrozenTrial]:
    """Trials that a process began and never told."""
    return study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))


@dataclass(frozen=True, kw_only=True)
class SearchRecord:
    """What the search of a study went by, so that its beliefs can be asked for later.

    Attributes:
        space: The knobs that were tuned, as `SearchSpace.parse` reads them.
        samples_per_rank: Set where the global batch was kept.
        setting: What legality depended on.
        memory_limit_bytes: What a rank could use; None if that is not known.
        bounds: What a solution had to keep: metric, which end, amount.
    """

    space: dict[str, Any]
    samples_per_rank: int | None
    setting: Setting
    memory_limit_bytes: float | None
    bounds: list[tuple[str, Literal["min", "max"], float]]


@dataclass(frozen=True, kw_only=True)
class StudyRecord:
    """What is kept with a study, so that it can be resumed, reported and exported without its target.

    Attributes:
        fingerprint: What must be the same for two runs to belong to one study.
        target: The user's file, relative to the study's folder where that is possible.
        world_size: Ranks of every trial.
        base_config: What candidates are laid over.
        baseline: The baseline's knob values.
        objectives: What is optimised; what the baseline could not measure is left out.
        reference: What the baseline's loss curve gives.
        workload: What the target turned out to be.
        learning_rate: How the trials followed the batch.
        invocation: How the script is started, where the target is one.
        branches: Another global batch is recommended only if a branch confirms it.
        search: What the search went by; None in studies of earlier versions.
    """

    fingerprint: dict[str, Any]
    target: str
    world_size: int
    base_config: DsConfig
    baseline: str
    objectives: list[Objective]
    reference: Reference | None
    workload: Workload
    learning_rate: LearningRate = field(default_factory=LearningRate)
    invocation: Invocation | None = None
    branches: bool = False
    search: SearchRecord | None = None

    def ds_config(self, candidate: Candidate) -> DsConfig:
        """The DeepSpeed configuration that a candidate's trial ran."""
        config, probed = candidate.to_deepspeed(self.base_config), self.workload.script
        config = probed.completed(config, candidate) if probed is not None else config
        return self.learning_rate.scaled(config, candidate.global_batch_size(self.data_parallel))

    @property
    def data_parallel(self) -> int:
        """Ranks with data of their own."""
        return self.workload.data_parallel(self.world_size)


def record(study: Study) -> StudyRecord | None:
    """What was kept with the study; None if autotune did not make it, or died while it did.

    Raises:
        StoreError: Another version of autotune made it.
    """
    text = study.user_attrs.get(RECORD_ATTR)
    try:
        return None if text is None else TypeAdapter(StudyRecord).validate_json(text)
    except ValidationError:
        raise StoreError(
            f"study {study.study_name!r} was made by another version of autotune; run it again with --fresh, or choose another --study name"
        ) from None


def keep(study: Study, kept: StudyRecord) -> None:
    """Keeps the record with the study."""
    data = TypeAdapter(StudyRecord).dump_python(kept, mode="json")
    study.set_user_attr(RECORD_ATTR, json.dumps(masking.masked(data)))


def note_end(study: Study, why: str) -> None:
    """Keeps why a study ended before its budget of trials; an empty text where it did not."""
    if study.user_attrs.get(ENDED_ATTR, "") != why:
        study.set_user_attr(ENDED_ATTR, why)


def told_trials(study: Study) -> list[FrozenTrial]:
    """Trials that ended as results, in order; lost ones are not among them."""
    states = (TrialState.COMPLETE, TrialState.PRUNED)
    return [told for told in study.get_trials(deepcopy=False, states=states) if MEASURED_ATTR in told.user_attrs]


def told_data(told: FrozenTrial) -> dict[str, Any]:
    """What was kept with a told trial, as `study` wrote it: outcome, reason, phase, wall_s, metrics, ci95, caveats and the like."""
    return _parsed(told.user_attrs[MEASURED_ATTR])


@functools.lru_cache(maxsize=20_000)
def _parsed(text: str) -> dict[str, Any]:
    """JSON that every trial is asked for at every step of a study; never changed by who reads it."""
    data: dict[str, Any] = json.loads(text)
    return data


def told_candidate(told: FrozenTrial) -> Candidate:
    """The configuration of a told trial."""
    return _candidate(told.user_attrs[CANDIDATE_ATTR])


_candidate = functools.lru_cache(maxsize=20_000)(Candidate.from_key)


def measured(study: Study, folder: Path, kept: StudyRecord, seen: dict[int, Measured] | None = None) -> list[Measured]:
    """Every told trial of a study, with its re-measurements, as the analysis takes it.

    Args:
        study: The study.
        folder: Its folder, in which the re-measurements lie.
        kept: Its record.
        seen: What was read before and has not changed since, by trial; what is read now joins it.
    """
    seen = {} if seen is None else seen
    told, own = told_trials(study), numerics(kept.ds_config(Candidate.from_key(kept.baseline)))
    seen |= {each.number: _as_measured(each, folder, kept, own) for each in told if each.number not in seen}
    return [seen[each.number] for each in told]


def _as_measured(told: FrozenTrial, folder: Path, kept: StudyRecord, own_numerics: Any) -> Measured:
    data, candidate = told_data(told), told_candidate(told)
    repeats = {}
    # Re-measurements time steps; they are too short for a loss curve.
    reference = replace(kept.reference, loss_target=None) if kept.reference is not None else None
    for n, path in repeat_paths(folder, told.number).items():
        result = trial.result_in(path)
        if result is not None and result.outcome is Outcome.COMPLETE and result.candidate == candidate.values():
            repeats[n] = {name: estimate.value for name, estimate in objective.measure(result, reference).items()}
    ds_config, verdict = kept.ds_config(candidate), verdict_in(folder, told.number)
    baseline = Candidate.from_key(kept.baseline)
    refused = verdict is not None and verdict.passed is False
    return Measured(
        trial=told.number,
        candidate=candidate,
        ds_config=ds_config,
        outcome=Outcome.DIVERGED if refused else Outcome(data["outcome"]),
        verdict=verdict,
        branch=branch_in(folder, told.number),
        branch_wanted=kept.branches
        and candidate.global_batch_size(kept.data_parallel) != baseline.global_batch_size(kept.data_parallel),
        numerics_kept=numerics(ds_config) == own_numerics,
        metrics=data["metrics"],
        ci95={name: (low, high) for name, (low, high) in data["ci95"].items()},
        feasible=data["feasible"],
        repeats=repeats,
        script_side_changes=data.get("side_changes", ()),
        unreproducible=data.get("unreproducible", ()),
    )


def branch_in(folder: Path, number: int) -> Branch | None:
    """What a branch of a trial showed; None if there was none."""
    try:
        return trial.read(branch_path(folder, number), Branch)
    except (FileNotFoundError, ValueError):
        return None


def verdict_in(folder: Path, number: int) -> Verdict | None:
    """What the quality gate said of a trial; None if it was not asked."""
    try:
        return trial.read(gate_path(folder, number), Verdict)
    except (FileNotFoundError, ValueError):
        return None


def trial_path(folder: Path, number: int) -> Path:
    """The folder of a trial."""
    return folder / "trials" / f"{number:04d}"


def repeat_paths(folder: Path, number: int) -> dict[int, Path]:
    """The folders of a trial's re-measurements by round."""
    found = trial_path(folder, number).glob("repeat-*")
    return dict(
        sorted(
            (int(path.name.removeprefix("repeat-")), path)
            for path in found
            if path.name.removeprefix("repeat-").isdigit()
        )
    )


def gate_path(folder: Path, number: int) -> Path:
    """Where a trial's verdict lies, once its numerics were checked."""
    return trial_path(folder, number) / "verdict.json"


def branch_path(folder: Path, number: int) -> Path:
    """Where it is kept what a branch of a trial showed."""
    return trial_path(folder, number) / "branch.json"


def warm_path(folder: Path) -> Path:
    """The weights that branches start from."""
    return folder / "trials" / "warm.pt"


def reference_path(folder: Path, batch: int) -> Path:
    """The folder of the trials that show how the baseline's numerics train at a global batch."""
    return folder / "trials" / f"reference-{batch}"


def repeat_path(folder: Path, number: int, n: int) -> Path:
    """The folder of a trial's n-th re-measurement."""
    return trial_path(folder, number) / f"repeat-{n}"


def study_folder(name: str, studies: Path, url: str) -> Path:
    """The folder of a study: below `studies`, or beside its SQLite database where only that has one.

    Raises:
        StoreError: Whatever has that name in the database, it is none of our studies; the name may lead anywhere.
    """
    try:
        check_name(name)
    except ValueError as error:
        raise StoreError(str(error)) from None
    beside = Path(url.removeprefix(SQLITE)).parent if url.startswith(SQLITE) else studies
    base, generation = generation_of(name)
    own = Path(base) / "retunes" / f"{generation:04d}" if generation else Path(name)
    return next((folder / own for folder in (studies, beside) if (folder / own).is_dir()), studies / own)


def generation_name(name: str, generation: int) -> str:
    """The study, as it lies in the database, of a study's n-th re-tuning."""
    return f"{name}.retune-{generation}"


def generation_of(name: str) -> tuple[str, int]:
    """The study that a name in the database belongs to, and which of its re-tunings it is (0: none)."""
    found = re.fullmatch(r"(.+)\.retune-([0-9]+)", name)
    return (found[1], int(found[2])) if found else (name, 0)


def current(study: Study) -> str:
    """The name of the study that holds the answer today: the last re-tuning that replaced it, else the study itself."""
    later = str(study.user_attrs.get(SUCCESSOR_ATTR, ""))
    return later if later and later in study_names(study._storage) else study.study_name  # type: ignore[arg-type]


def succeed(study: Study, later: str) -> None:
    """Makes a re-tuning the holder of a study's answer."""
    study.set_user_attr(SUCCESSOR_ATTR, later)
