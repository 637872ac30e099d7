"""What a study stores in the database: its record, the results of its trials, and how both are read back."""

import contextlib
import copy
import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar

import optuna
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState
from pydantic import ValidationError

from autotune.errors import UserError, nearest
from autotune.scoring.convergence.learning_rate import LearningRate
from autotune.scoring.convergence.time_to_loss import Reference
from autotune.scoring.metrics import Direction
from autotune.scoring.objective import Bound, Objective
from autotune.search.observation import MEASURED_ATTR, parsed
from autotune.space.candidate import CANDIDATE_ATTR, Candidate
from autotune.space.deepspeed import DsConfig
from autotune.space.rule import Setting
from autotune.study.folder import RECORD_FILE, retuning_path
from autotune.study.spec.spec import StudySpec, check_name
from autotune.study.storage import database
from autotune.study.storage.database import Storage, StoreError, StoreMissing
from autotune.study.storage.generations import generation_of
from autotune.study.storage.history import History
from autotune.study.storage.optuna_tables import CachedStorage, set_study_attr, storage_of, study_attr, study_id
from autotune.system import files, redaction
from autotune.trial.command import Invocation
from autotune.trial.folder import adapter, record_in
from autotune.trial.result import Outcome
from autotune.trial.workload import Workload

# System attributes, which dashboards do not list: a study's record and a trial's measurements are long JSON texts.
RECORD_ATTR = "autotune:record"
ROLE_ATTR, ENDED_ATTR = "role", "ended"
# Fields of a study that a run may change and its workers must know. The others are the same for all of its trials.
SETTINGS = (
    "trials", "sampler", "memory_filter", "stop_below", "stop_trials", "trial_budget_s",
    "trial_deadline_s", "min_samples",
)  # fmt: skip
# Stored for those who watch the study; a worker reads them in the study's file.
WATCHED = ("time_budget_s", "max_length", "device_memory_bytes", "quick", "at_once")
# Name of the re-tuning's study that holds this study's answer today.
SUCCESSOR_ATTR = "successor"
# Fields of a told trial's result without which it cannot be read.
TOLD_FIELDS = set("outcome reason phase wall_s metrics ci95 censored feasible caveats".split())
BASELINE_ATTR = "autotune:baseline"
T = TypeVar("T")


@dataclass(frozen=True)
class Stored(Generic[T]):
    """A value that a study keeps in a system attribute.

    Attributes:
        kind: Its type, which makes the value before one is stored, and refuses what is none.
    """

    attr: str
    kind: Callable[..., T]

    def of(self, study: Study) -> T:
        """The study's value."""
        return self.kind(study_attr(study, self.attr, self.kind()))

    def store(self, study: Study, value: T) -> None:
        """Give the study a value."""
        set_study_attr(study, self.attr, value)


# What the run's spec states of `SETTINGS` and `WATCHED`.
STATED = Stored("autotune:settings", dict[str, Any])
# Seconds that a study has taken, all of its runs together, and the Unix time at which it is expected to end, from its first trial on.
WALL_S, ENDS_S = Stored("autotune:wall_s", float), Stored("autotune:ends_s", float)
# Seconds that the check which decides the answer takes, where it was not made for want of time.
UNCHECKED_S = Stored("autotune:unchecked_s", float)
# What the last run does not try, in a sentence, by a word for the reason.
LEFT_OUT = Stored("autotune:left_out", dict[str, str])


def default_url(studies: Path) -> str:
    """The database beside the study folders."""
    return database.url_of(studies / "autotune.db")


def study_names(storage: Storage) -> list[str]:
    """Names of the studies in the database, sorted."""
    return sorted(study.study_name for study in CachedStorage(storage).get_all_studies())


def load_study(storage: Storage, name: str) -> Study:
    """The study of that name."""
    try:
        return optuna.load_study(study_name=name, storage=CachedStorage(storage))
    except KeyError:
        names = study_names(storage)
        known = f"Known: {', '.join(names)}." if names else "There is none yet."
        raise StoreMissing(f"no study {name!r} in {storage.shown}.{nearest(name, names)} {known}") from None


def create_study(storage: Storage, name: str, directions: Sequence[Direction], metric_names: Sequence[str]) -> Study:
    """Create the study, or open it if it exists."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        study = optuna.create_study(
            study_name=name, storage=CachedStorage(storage), directions=list(directions), load_if_exists=True
        )
        study.set_metric_names(list(metric_names))
    return study


def delete_study(storage: Storage, name: str) -> None:
    """Remove a study with its trials, its re-tunings and its history; a missing study is no error."""
    for own in [name, *(other for other in study_names(storage) if other != name and generation_of(other)[0] == name)]:
        with contextlib.suppress(KeyError):
            optuna.delete_study(study_name=own, storage=CachedStorage(storage))
    History(storage.engine).forget(name)


def note_settings(study: Study, spec: StudySpec) -> None:
    """Store the run's budget and search settings for its workers."""
    stated = {name: getattr(spec, name) for name in (*SETTINGS, *WATCHED)}
    if STATED.of(study) != stated:
        STATED.store(study, stated)


def snapshot(study: Study, *, news: bool = True) -> contextlib.AbstractContextManager[None]:
    """Show the same trials throughout the block: read anew by one query or, if not `news`, as they were last read."""
    return storage_of(study).still(study_id(study), news=news)


def running(study: Study) -> list[FrozenTrial]:
    """Trials that have begun and not ended."""
    return study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))


@dataclass(frozen=True, kw_only=True)
class SearchRecord:
    """Inputs of a study's search, from which its beliefs can be computed again.

    Attributes:
        space: The knobs that were tuned, as `SearchSpace.stored` reads them.
        samples_per_rank: Samples per rank and step, where the global batch was fixed.
        setting: The machine and model that legality depended on.
        memory_limit_bytes: Memory available to a rank; None if unknown.
        bounds: Constraints.
    """

    space: dict[str, Any]
    samples_per_rank: float | None
    setting: Setting
    memory_limit_bytes: float | None
    bounds: list[Bound]


@dataclass(frozen=True, kw_only=True)
class StudyRecord:
    """Everything stored with a study to resume, report and export it without its target.

    Attributes:
        fingerprint: Settings that two runs of one study share.
        target: The user's file, relative to the study's folder where possible.
        world_size: Ranks of every trial.
        base_config: DeepSpeed configuration that candidates change.
        baseline: Key of the baseline's candidate.
        objectives: The objectives that the baseline could measure.
        reference: Loss target and noise, from the baseline's loss curve.
        learning_rate: How the learning rate followed the batch.
        invocation: How the script is started; None for a `model.py`.
        branches: Whether another global batch must be confirmed by a branch.
        goal: The goal that set the objectives; None where they were stated.
    """

    fingerprint: dict[str, Any]
    target: str
    world_size: int
    base_config: DsConfig
    baseline: str
    objectives: list[Objective]
    reference: Reference | None
    workload: Workload
    search: SearchRecord
    learning_rate: LearningRate = field(default_factory=LearningRate)
    invocation: Invocation | None = None
    branches: bool = False
    goal: str | None = None

    def ds_config(self, candidate: Candidate) -> DsConfig:
        """The DeepSpeed configuration of a candidate's trial."""
        config = self.workload.ds_config(candidate, self.base_config)
        return self.learning_rate.scaled(config, candidate.global_batch_size(self.data_parallel))

    @property
    def data_parallel(self) -> int:
        """Ranks that read different samples."""
        return self.workload.data_parallel(self.world_size)


def record(study: Study) -> StudyRecord | None:
    """The study's record; None if autotune did not create the study, or died while it did.

    Raises:
        StoreError: Another version of autotune wrote it.
    """
    return _record_of(study.study_name, study_attr(study, RECORD_ATTR))


def kept_records(storage: Storage) -> Iterator[tuple[str, StudyRecord]]:
    """The names and records of the studies in the database, the one that ran last first; those that cannot be read are left out."""
    studies = CachedStorage(storage).get_all_studies()
    for each in sorted(studies, key=lambda one: -one.system_attrs.get(ENDS_S.attr, 0.0)):
        with contextlib.suppress(StoreError):
            if (kept := _record_of(each.study_name, each.system_attrs.get(RECORD_ATTR))) is not None:
                yield each.study_name, kept


def _record_of(name: str, text: str | None) -> StudyRecord | None:
    try:
        return None if text is None else adapter(StudyRecord).validate_json(text)
    except ValidationError:
        raise StoreError(
            f"study {name!r} was made by another version of autotune;"
            " run it again with --fresh, or choose another --study name"
        ) from None


def keep(study: Study, kept: StudyRecord, folder: Path) -> None:
    """Store the record with the study, and in its folder in case that the database is lost."""
    text = json.dumps(redaction.redact(adapter(StudyRecord).dump_python(kept, mode="json")))
    set_study_attr(study, RECORD_ATTR, text)
    files.write_text(folder / RECORD_FILE, text)


def kept_in(folder: Path) -> StudyRecord | None:
    """The record in a study's folder; None without one that can be read."""
    return record_in(folder / RECORD_FILE, StudyRecord)


def note_end(study: Study, why: str) -> None:
    """Store why a study ended before its budget of trials; an empty text if it did not."""
    if study.user_attrs.get(ENDED_ATTR, "") != why:
        study.set_user_attr(ENDED_ATTR, why)


def note_left_out(study: Study, why: str, said: str) -> None:
    """Store what a run does not try, in a sentence, under a word for the reason; an empty text if nothing."""
    found = LEFT_OUT.of(study)
    if found.get(why, "") != said:
        LEFT_OUT.store(study, found | {why: said})


def told_trials(study: Study) -> list[FrozenTrial]:
    """Trials that ended with a result, in order; lost trials and unreadable ones are left out."""
    return [told for told in _with_result(study) if _is_readable(told)]


def measurements(storage: Storage, study: str | None = None) -> list[dict[str, Any]]:
    """The trials of all studies, or of one and its re-tunings, newest first, each with the environment of its study."""
    rows = list[dict[str, Any]]()
    for name, kept in kept_records(storage):
        base, generation = generation_of(name)
        if study not in (None, base):
            continue
        shared = {
            "study": base, "generation": generation, "environment": asdict(kept.workload.environment), "world_size": kept.world_size,
            "structure": kept.workload.structure, "n_parameters": kept.workload.n_parameters,
        }  # fmt: skip
        with contextlib.suppress(StoreMissing, KeyError):  # another process deletes it now
            for told in told_trials(load_study(storage, name)):
                data, ended = told_data(told), told.datetime_complete
                own = {
                    "trial": told.number,
                    "role": told.user_attrs.get(ROLE_ATTR, "search"),
                    "candidate": told.user_attrs[CANDIDATE_ATTR],
                }
                own |= {key: data[key] for key in ("outcome", "metrics", "wall_s")}
                rows.append({"at": ended.timestamp() if ended is not None else 0.0, **shared, **own})
    return sorted(rows, key=lambda row: -row["at"])


def lost(study: Study) -> list[FrozenTrial]:
    """Trials whose run ended before they did, in order; their configurations are run again under other numbers."""
    failed = study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
    return [trial for trial in failed if CANDIDATE_ATTR in trial.user_attrs]


def unreadable(study: Study) -> list[int]:
    """Numbers of the trials that ended with a result that cannot be read: their row is damaged."""
    damaged = [told.number for told in _with_result(study) if not _is_readable(told)]
    return sorted({*damaged, *storage_of(study).unreadable.get(study_id(study), [])})


def _with_result(study: Study) -> list[FrozenTrial]:
    states = (TrialState.COMPLETE, TrialState.PRUNED)
    found = [told for told in study.get_trials(deepcopy=False, states=states) if MEASURED_ATTR in told.system_attrs]
    if found and found[0].number == 0 and found[0].user_attrs.get("outcome") in (Outcome.CRASHED, Outcome.TIMEOUT):
        found[0] = _as_measured_later(study, found[0])
    return found


def note_baseline(study: Study, measured: dict[str, Any]) -> None:
    """Store what a baseline that crashed or timed out at first measured later, in place of its trial's: a told trial cannot be changed."""
    stated: dict[str, Any] = {"measured": json.dumps(measured), "at_s": time.time()}
    set_study_attr(study, BASELINE_ATTR, stated)


def _as_measured_later(study: Study, crashed: FrozenTrial) -> FrozenTrial:
    later = study_attr(study, BASELINE_ATTR)
    if later is None:
        return crashed
    told = copy.copy(crashed)
    told.system_attrs = {**crashed.system_attrs, MEASURED_ATTR: later["measured"]}
    told.datetime_complete = datetime.fromtimestamp(later["at_s"])
    told.datetime_start = told.datetime_complete - timedelta(seconds=told_data(told)["wall_s"])
    return told


def _is_readable(told: FrozenTrial) -> bool:
    try:
        data = told_data(told)
        told_candidate(told)
        return data.keys() >= TOLD_FIELDS and data["outcome"] in set(Outcome)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, UserError):
        return False


def told_data(told: FrozenTrial) -> dict[str, Any]:
    """Result of a told trial: outcome, reason, phase, wall_s, metrics, ci95, caveats and more."""
    return parsed(told.system_attrs.get(MEASURED_ATTR) or "")


def told_candidate(told: FrozenTrial) -> Candidate:
    """The configuration of a told trial."""
    return Candidate.from_key(told.user_attrs[CANDIDATE_ATTR])


def study_folder(name: str, studies: Path, url: str) -> Path:
    """The folder of a study: below `studies`, or beside its SQLite database where only that has one.

    Raises:
        StoreError: The name is no plain folder name, so it may come from another program and lead anywhere.
    """
    base, generation = generation_of(name)
    try:
        check_name(base)
    except ValueError as error:
        raise StoreError(str(error)) from None
    beside = Path(file).parent if (file := database.file_of(url)) else studies
    own = retuning_path(Path(base), generation) if generation else Path(name)
    return next((folder / own for folder in (studies, beside) if (folder / own).is_dir()), studies / own)


def current(study: Study) -> str:
    """Name of the study that holds the answer today: the last re-tuning that replaced it, else the study itself."""
    later = str(study.user_attrs.get(SUCCESSOR_ATTR, ""))
    names = {each.study_name for each in storage_of(study).get_all_studies()} if later else set()
    return later if later in names else study.study_name


def succeed(study: Study, later: str) -> None:
    """Make a re-tuning's study the holder of a study's answer."""
    study.set_user_attr(SUCCESSOR_ATTR, later)
