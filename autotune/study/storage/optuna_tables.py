"""The only use of Optuna's internals: its cache, ids, reserved attributes, and four of its tables.

`tests/study/storage/test_optuna_conformance.py` checks each of them against the installed Optuna.
"""

import contextlib
import copy
import functools
import itertools
import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import optuna
import sqlalchemy as sql
from optuna.distributions import BaseDistribution, distribution_to_json
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages._cached_storage import _CachedStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from autotune.errors import printable
from autotune.study.storage.database import Storage, StoreError

GONE = "Record does not exist."  # what Optuna says of a study, or of its trial, that was deleted
NOTE_PIECE_CHARS = 2045  # optuna-dashboard spreads the text of a note over attributes of this length
# Optuna's tables, in the columns that are written here.
TRIALS = sql.table(
    "trials", *map(sql.column, ("trial_id", "study_id", "number", "state")),
    *(sql.column(name, sql.DateTime()) for name in ("datetime_start", "datetime_complete")),
)  # fmt: skip
PARAMS = sql.table("trial_params", *map(sql.column, ("trial_id", "param_name", "param_value", "distribution_json")))
USER_ATTRS, SYSTEM_ATTRS = (
    sql.table(f"trial_{kind}_attributes", *map(sql.column, ("trial_id", "key", "value_json")))
    for kind in ("user", "system")
)
STUDY_ATTRS = sql.table("study_system_attributes", *map(sql.column, ("study_id", "key", "value_json")))
# What Optuna and SQLAlchemy raise of a value that another program garbled; of a row that is not there, a KeyError.
GARBLED = (LookupError, TypeError, ValueError)
T = TypeVar("T")


class CachedStorage(_CachedStorage):
    """Optuna's cache of trials over our storage; it retries while the database is away, and can hold still.

    Attributes:
        unreadable: By study id: numbers of trials whose row cannot be read; they are left out.
    """

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.patiently, self.shown, self.engine = storage.patiently, storage.shown, storage.engine
        self.unreadable: dict[int, list[int]] = {}
        self._holds = False
        self._seen: dict[int, list[FrozenTrial]] = {}

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """Return a study's trials by number: as they are now or, inside `still`, as they were last read."""
        if not (self._holds and study_id in self._seen) and not self._is_current(study_id):
            found = list[FrozenTrial]()
            try:
                found = self.patiently(lambda: super(CachedStorage, self).get_all_trials(study_id, False))
                is_whole = all(isinstance(trial.number, int) for trial in found)
            except KeyError:
                raise
            except GARBLED:
                is_whole = False
            found = found if is_whole else self._readable_trials(study_id)
            self._seen[study_id] = found
        found = [trial for trial in self._seen[study_id] if states is None or trial.state in states]
        return copy.deepcopy(found) if deepcopy else found

    def _is_current(self, study_id: int) -> bool:
        """Whether the trials are as they were last read: all had ended, and none was added. Optuna asks that in ten times as long."""
        seen = self._seen.get(study_id)
        if not seen or not all(trial.state.is_finished() for trial in seen):
            return False
        newest = sql.select(sql.func.max(TRIALS.c.trial_id)).where(TRIALS.c.study_id == study_id)

        def asked() -> int | None:
            with self.engine.connect() as connection:
                found: int | None = connection.scalar(newest)
                return found

        return self.patiently(asked) == max(map(trial_id, seen))

    def _readable_trials(self, study_id: int) -> list[FrozenTrial]:
        """Read a study's trials one by one, without those that cannot be read."""
        found, damaged = list[FrozenTrial](), list[int]()
        rows = sql.select(TRIALS.c.trial_id, TRIALS.c.number).where(TRIALS.c.study_id == study_id)
        with self.engine.connect() as connection:
            known = connection.execute(rows.order_by(TRIALS.c.trial_id)).all()
        for trial_id, number in known:
            if not isinstance(number, int):
                where = f"the number in row {trial_id} of the table trials"
                raise StoreError(f"storage {self.shown}: {where} cannot be read; restore a copy")
            try:
                found.append(self.get_trial(trial_id))
            except StoreError:
                damaged.append(number)
        self.unreadable[study_id] = damaged
        return sorted(found, key=lambda trial: trial.number)

    @contextlib.contextmanager
    def still(self, study_id: int, *, news: bool = True) -> Iterator[None]:
        """Show the same trials throughout the block, at the price of one query.

        Args:
            news: False shows the trials as they were last read, without a query.
        """
        if news or study_id not in self._seen:
            self.get_all_trials(study_id, deepcopy=False)
        before, self._holds = self._holds, True
        try:
            yield
        finally:
            self._holds = before


def _patient(method: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(method)
    def patient(self: CachedStorage, *args: Any, **kwargs: Any) -> T:
        try:
            return self.patiently(lambda: method(self, *args, **kwargs))
        except KeyError:
            raise
        except GARBLED as error:
            if not (isinstance(error, json.JSONDecodeError) or method.__name__.startswith("get_")):
                raise  # of an argument
            what, said = method.__name__.removeprefix("get_").replace("_", " "), printable(str(error))[:200]
            raise StoreError(
                f"storage {self.shown}: a value of the {what} cannot be read ({said}); restore a copy"
            ) from None

    return patient


# Each may be repeated after a lost answer. A trial that was created twice has no lease and is failed later
# (`StudyLeases.abandoned`).
PATIENT = (
    "create_new_study", "create_new_trial", "get_study_id_from_name", "get_study_name_from_id", "get_study_directions",
    "get_study_user_attrs", "get_study_system_attrs", "get_all_studies", "get_trial", "set_study_user_attr",
    "set_study_system_attr", "set_trial_user_attr", "set_trial_system_attr",
)  # fmt: skip
for _name in PATIENT:
    setattr(CachedStorage, _name, _patient(getattr(_CachedStorage, _name)))


def storage_of(study: Study) -> CachedStorage:
    """The storage that `records` opened a study with."""
    storage = study._storage
    assert isinstance(storage, CachedStorage)
    return storage


def study_id(study: Study) -> int:
    """The study's id in its storage."""
    return study._study_id


def study_attr(study: Study, key: str, default: Any = None) -> Any:
    """A system attribute of a study: for programs, as dashboards do not list it."""
    return storage_of(study).get_study_system_attrs(study_id(study)).get(key, default)


def set_study_attr(study: Study, key: str, value: Any) -> None:
    """Store a system attribute of a study; Optuna stores the first one of a key, and checks that there is the study."""
    storage = storage_of(study)
    if not storage.patiently(lambda: _replaced(storage, study_id(study), key, value)):
        storage.set_study_system_attr(study_id(study), key, value)


def _replaced(storage: CachedStorage, number: int, key: str, value: Any) -> bool:
    """Replaces an attribute of the study with this id in one statement; false if it has none of that key."""
    same = (STUDY_ATTRS.c.study_id == number) & (STUDY_ATTRS.c.key == key)
    with storage.engine.begin() as connection:
        return bool(
            connection.execute(sql.update(STUDY_ATTRS).where(same).values(value_json=json.dumps(value))).rowcount
        )


@contextlib.contextmanager
def stoppable(study: Study) -> Iterator[None]:
    """Lets `study.stop()` be called in the block, as in a callback of `Study.optimize`; `was_stopped` tells whether it was."""
    study._thread_local.in_optimize_loop = True
    try:
        yield
    finally:
        study._thread_local.in_optimize_loop = False


def was_stopped(study: Study) -> bool:
    """Whether `study.stop()` was called of this very object."""
    return bool(study._stop_flag)


def trial_id(trial: Trial | FrozenTrial) -> int:
    """The trial's id in its storage."""
    return trial._trial_id


def write_trial(
    connection: sql.Connection,
    number: int,
    *,
    params: Mapping[str, tuple[Any, BaseDistribution]] | None = None,
    user_attrs: Mapping[str, Any] | None = None,
    system_attrs: Mapping[str, Any] | None = None,
) -> None:
    """Write parameters and attributes of a running trial in the caller's transaction; replaces those of equal name.

    Optuna's storage interface takes one transaction and two or three statements for each. This takes two statements
    for all parameters and two for all attributes of a kind.

    Args:
        number: Id of the trial, as `trial_id` gives it.
        params: Value and distribution of each parameter.
        user_attrs: Attributes that dashboards show.
        system_attrs: Attributes for programs.

    Raises:
        UpdateFinishedTrialError: The trial has ended.
        KeyError: The trial was deleted; its argument is `GONE`.
    """
    state = connection.scalar(sql.select(TRIALS.c.state).where(TRIALS.c.trial_id == number).with_for_update())
    if state is None:
        raise KeyError(GONE)
    if state != TrialState.RUNNING.name:
        raise UpdateFinishedTrialError(f"the trial of id {number} has ended")
    described = [
        {
            "param_name": name,
            "param_value": kind.to_internal_repr(value),
            "distribution_json": distribution_to_json(kind),
        }
        for name, (value, kind) in (params or {}).items()
    ]
    _replace(connection, PARAMS, "param_name", number, described)
    for table, attrs in (USER_ATTRS, user_attrs), (SYSTEM_ATTRS, system_attrs):
        stated = [{"key": key, "value_json": json.dumps(value)} for key, value in (attrs or {}).items()]
        _replace(connection, table, "key", number, stated)


def write_dates(connection: sql.Connection, number: int, began: datetime, ended: datetime) -> None:
    """Write when a trial that has just ended ran, in local time, before its row is read again: the cache would keep it."""
    dates = {"datetime_start": began, "datetime_complete": ended}
    connection.execute(sql.update(TRIALS).where(TRIALS.c.trial_id == number).values(**dates))


def write_failed(connection: sql.Connection, numbers: Sequence[int]) -> None:
    """Write that trials which have ended failed, before the study is read again: the cache would keep what they were."""
    same = TRIALS.c.trial_id.in_(numbers)
    connection.execute(sql.update(TRIALS).where(same).values(state=TrialState.FAIL.name))


def _replace(
    connection: sql.Connection, table: sql.TableClause, key: str, number: int, rows: list[dict[str, Any]]
) -> None:
    if rows:
        same = (table.c.trial_id == number) & table.c[key].in_([row[key] for row in rows])
        connection.execute(sql.delete(table).where(same))
        connection.execute(sql.insert(table), [{"trial_id": number} | row for row in rows])


def constraint_attrs(constraints: Mapping[str, float]) -> dict[str, Any]:
    """System attributes that Optuna takes for constraints (violated if positive): by name since Optuna 5."""
    if hasattr(optuna.trial.Trial, "set_constraint"):
        return {f"constraints:{name}": value for name, value in constraints.items()}
    return {"constraints": list(constraints.values())} if constraints else {}


@dataclass(frozen=True)
class Note:
    """A note of optuna-dashboard.

    Attributes:
        key: Beginning of its attributes' names.
        version: Incremented with each change; 0 if there is no note.
        n_pieces: Attributes that the text is spread over.
    """

    key: str
    version: int
    text: str
    n_pieces: int


def note_of(attrs: Mapping[str, Any], owner: int | str | None = None) -> Note:
    """The note in a study's system attributes.

    Args:
        owner: Id of the trial that the note belongs to, or `Note.key`; None for the study's own.
    """
    key = owner if isinstance(owner, str) else "dashboard:" if owner is None else f"dashboard:{owner}:"
    n_pieces = next(n for n in itertools.count() if f"{key}note_str:{n}" not in attrs)
    text = "".join(str(attrs[f"{key}note_str:{n}"]) for n in range(n_pieces))
    return Note(key=key, version=int(attrs.get(f"{key}note_ver", 0)), text=text, n_pieces=n_pieces)


def note_attrs(text: str, before: Note) -> dict[str, Any]:
    """System attributes of a study that optuna-dashboard shows as a note."""
    pieces = [text[start : start + NOTE_PIECE_CHARS] for start in range(0, len(text), NOTE_PIECE_CHARS)]
    pieces += [""] * (before.n_pieces - len(pieces))
    return {f"{before.key}note_ver": before.version + 1} | {
        f"{before.key}note_str:{n}": piece for n, piece in enumerate(pieces)
    }
