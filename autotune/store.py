"""The database: the only module that knows it. Optuna's storage, opened safely for several processes."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import optuna
import sqlalchemy
from optuna.storages import RDBStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState
from pydantic import TypeAdapter, ValidationError

from autotune import UserError, history, objective, trial
from autotune.analysis.recommend import Measured
from autotune.branch import Branch
from autotune.candidate import CANDIDATE_ATTR, Candidate, DsConfig, Setting
from autotune.convergence import LearningRate
from autotune.gate import Verdict, numerics
from autotune.invocation import Invocation
from autotune.objective import Direction, Objective, Reference
from autotune.trial import Outcome, Workload

MEASURED_ATTR, ROLE_ATTR, RECORD_ATTR, ENDED_ATTR = "measured", "role", "autotune", "ended"
HEARTBEAT_S = 10
GRACE_S = 60
# Which re-tuning's study holds the answer of this one today.
SUCCESSOR_ATTR = "successor"
SQLITE = "sqlite:///"
BUSY_TIMEOUT_S = 60


class StoreError(UserError):
    """The database cannot be used, or does not hold what was asked for."""


def default_url(studies: Path) -> str:
    """The database beside the study folders."""
    return f"{SQLITE}{(studies / 'autotune.db').as_posix()}"


def open_storage(url: str, *, create: bool = True) -> RDBStorage:
    """Opens (or makes) the database.

    SQLite is put into write-ahead mode, in which readers and one writer do not block each other, and waits for a lock
    instead of failing.

    Raises:
        StoreError: The URL is wrong, its driver is missing, or the database does not answer.
    """
    if url.startswith("sqlite"):
        _check_file(url, create=create)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    connect = {"connect_args": {"timeout": BUSY_TIMEOUT_S}} if url.startswith("sqlite") else {"pool_pre_ping": True}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            storage = RDBStorage(url, engine_kwargs=connect, heartbeat_interval=HEARTBEAT_S, grace_period=GRACE_S)
        if url.startswith("sqlite"):
            _tune_sqlite(storage.engine)
    except ImportError:
        dialect = url.partition(":")[0]
        raise StoreError(f"storage {_without_password(url)}: SQLAlchemy's driver for {dialect} is not installed") from None
    except (sqlalchemy.exc.SQLAlchemyError, RuntimeError, ValueError) as error:
        hint = "Pass a SQLAlchemy URL, for example sqlite:///studies/autotune.db"
        raise StoreError(f"storage {_without_password(url)}: {_reason(error)}. {hint}") from None
    return storage


def _check_file(url: str, *, create: bool) -> None:
    """Makes the folder of an SQLite database, or refuses a database that is not there or would not stay."""
    try:
        name = sqlalchemy.make_url(url).database
    except sqlalchemy.exc.ArgumentError:
        return  # said better by who opens it
    if not name or name == ":memory:":
        raise StoreError(f"storage {url}: it would be gone at the end of the run; name a file, for example sqlite:///studies/autotune.db")
    if not create and not Path(name).exists():
        raise StoreError(f"no database at {name}: nothing has been tuned there yet (or pass --storage URL)")
    try:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"storage {url}: {error.strerror}: {Path(name).parent}") from None


@contextlib.contextmanager
def failing_in_words(url: str) -> Iterator[None]:
    """A database that fails in the middle of a run (full disk, lost server) ends it with a sentence.

    Raises:
        StoreError: In place of whatever SQLAlchemy or Optuna raised.
    """
    try:
        yield
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        cause = error.__cause__ if isinstance(error, optuna.exceptions.StorageInternalError) else error
        raise StoreError(f"storage {_without_password(url)}: {_reason(cause or error)}; what was told before is kept") from None


def _reason(error: BaseException) -> str:
    lines = str(getattr(error, "orig", None) or error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


def _tune_sqlite(engine: sqlalchemy.Engine) -> None:
    def on_connect(connection: Any, _record: object) -> None:
        # With a write-ahead log NORMAL cannot corrupt; results are synced as files before they are told.
        connection.execute("PRAGMA synchronous=NORMAL")

    sqlalchemy.event.listen(engine, "connect", on_connect)
    engine.dispose()
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text("PRAGMA journal_mode=WAL"))


def _without_password(url: str) -> str:
    try:
        return sqlalchemy.make_url(url).render_as_string(hide_password=True)
    except sqlalchemy.exc.ArgumentError:
        return url.rsplit("@", maxsplit=1)[-1]


def study_names(storage: RDBStorage) -> list[str]:
    """Names of the studies in the database, sorted."""
    return sorted(study.study_name for study in optuna.get_all_study_summaries(storage, include_best_trial=False))


def load_study(storage: RDBStorage, name: str) -> Study:
    """The study of that name.

    Raises:
        StoreError: It is not there; the message lists those that are.
    """
    try:
        return optuna.load_study(study_name=name, storage=storage)
    except KeyError:
        names = study_names(storage)
        known = f"Known: {', '.join(names)}." if names else "There is none yet."
        raise StoreError(f"no study {name!r} in {_without_password(str(storage.url))}. {known}") from None


def create_study(storage: RDBStorage, name: str, directions: Sequence[Direction], metric_names: Sequence[str]) -> Study:
    """Makes the study, or opens it if it is there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        study = optuna.create_study(study_name=name, storage=storage, directions=list(directions), load_if_exists=True)
        study.set_metric_names(list(metric_names))
    return study


def delete_study(storage: RDBStorage, name: str) -> None:
    """Removes a study with its trials, its re-tunings and its history; one that is not there is no error."""
    for own in [name, *(other for other in study_names(storage) if other != name and generation_of(other)[0] == name)]:
        with contextlib.suppress(KeyError):
            optuna.delete_study(study_name=own, storage=storage)
    history.forget(storage.engine, name)


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
    study.set_user_attr(RECORD_ATTR, TypeAdapter(StudyRecord).dump_json(kept).decode())


def note_end(study: Study, why: str) -> None:
    """Keeps why a study ended before its budget of trials; an empty text where it did not."""
    if study.user_attrs.get(ENDED_ATTR, "") != why:
        study.set_user_attr(ENDED_ATTR, why)


@contextlib.contextmanager
def heartbeat(study: Study, trial_id: int) -> Iterator[None]:
    """Says in the database, again and again, that the trial's process lives: Optuna does so only inside `optimize`."""
    storage = study._storage
    stop = threading.Event()

    def beat() -> None:
        while not stop.is_set():
            with contextlib.suppress(Exception):  # a missed beat is not worth a trial
                storage.record_heartbeat(trial_id)  # type: ignore[attr-defined]
            stop.wait(HEARTBEAT_S)

    thread = threading.Thread(target=beat, name="autotune-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def told_trials(study: Study) -> list[FrozenTrial]:
    """Trials that ended as results, in order; lost ones are not among them."""
    states = (TrialState.COMPLETE, TrialState.PRUNED)
    return [told for told in study.get_trials(deepcopy=False, states=states) if MEASURED_ATTR in told.user_attrs]


def told_data(told: FrozenTrial) -> dict[str, Any]:
    """What was kept with a told trial, as `study` wrote it: outcome, reason, phase, wall_s, metrics, ci95, caveats and the like."""
    data: dict[str, Any] = json.loads(told.user_attrs[MEASURED_ATTR])
    return data


def told_candidate(told: FrozenTrial) -> Candidate:
    """The configuration of a told trial."""
    return Candidate.from_key(told.user_attrs[CANDIDATE_ATTR])


def measured(study: Study, folder: Path, kept: StudyRecord) -> list[Measured]:
    """Every told trial of a study, with its re-measurements, as the analysis takes it.

    Args:
        study: The study.
        folder: Its folder, in which the re-measurements lie.
        kept: Its record.
    """
    return [_as_measured(told, folder, kept) for told in told_trials(study)]


def _as_measured(told: FrozenTrial, folder: Path, kept: StudyRecord) -> Measured:
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
        branch_wanted=kept.branches and candidate.global_batch_size(kept.data_parallel) != baseline.global_batch_size(kept.data_parallel),
        numerics_kept=numerics(ds_config) == numerics(kept.ds_config(baseline)),
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
    return dict(sorted((int(path.name.removeprefix("repeat-")), path) for path in found if path.name.removeprefix("repeat-").isdigit()))


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
    """The folder of a study: below `studies`, or beside its SQLite database where only that has one."""
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
