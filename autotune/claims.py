"""Who runs which trial: several coordinators on one study, none of which takes, loses or tells a trial twice.

Beside Optuna's tables lie two of ours. A row of `autotune_leases` is a right, to tell one trial or to lead one study; it has an
owner, who counts up its `beat` while he lives. Who ends a trial removes its lease in the same transaction, so that it ends once.
A lease whose beat stands still for `STALE_LOOKS` looks in a row belongs to somebody dead, and may be taken over: looks count only
while the database answers, and no clock is compared with another one's. The row of a study in `autotune_turns` is held by whoever
decides what to run next, so that budget and candidates are not given away twice.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy
from optuna.distributions import BaseDistribution, distribution_to_json
from optuna.storages._rdb import models
from optuna.study import Study
from optuna.study._constrained_optimization import _CONSTRAINTS_KEY
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy import Column, Connection, Integer, MetaData, String, Table, delete, insert, select, update
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.orm import Session

from autotune import UserError, liveness
from autotune.database import MADE_MEANWHILE, Storage, StoreError

HEARTBEAT_S = 5.0
STALE_LOOKS = 12
# Who decides holds a transaction meanwhile; a host that vanished without a word must not hold it for ever.
LONGEST_TURN_S = 120
LEAD = "lead"
TOLD_BY_ATTR = "told_by"

_schema = MetaData()
_leases = Table(
    "autotune_leases", _schema,
    Column("study", String(256), primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("owner", String(256), nullable=False),
    Column("token", String(32), nullable=False),
    Column("beat", Integer, nullable=False),
)  # fmt: skip
_turns = Table("autotune_turns", _schema, Column("study", String(256), primary_key=True))


class TurnLost(Exception):
    """The turn ended while its holder was still deciding; what was decided must not be done."""


@dataclass(frozen=True)
class Owner:
    """A process that runs trials; as text it is what a lease says.

    Attributes:
        host: Name of its host, for people.
        kernel: The running kernel and its set of process numbers: only there does the number mean the process.
        pid: Its number.
        started: When the process began, since numbers are used again.
        mark: What tells it from another one in the same process.
    """

    host: str
    kernel: str
    pid: int
    started: str
    mark: str

    @classmethod
    def here(cls) -> Owner:
        """This process."""
        return cls(platform.node(), _kernel(), os.getpid(), liveness.started(os.getpid()) or "", uuid.uuid4().hex[:8])

    @classmethod
    def read(cls, text: str) -> Owner:
        """The owner that `str` wrote."""
        host, kernel, pid, started, mark = text.split("|")
        return cls(host, kernel, int(pid), started, mark)

    def __str__(self) -> str:
        return "|".join((self.host, self.kernel, str(self.pid), self.started, self.mark))

    @property
    def shown(self) -> str:
        """For people."""
        return f"process {self.pid} on {self.host}"

    def lives(self) -> bool | None:
        """Whether the process lives; None where only its own host knows."""
        return None if self.kernel != _kernel() else liveness.started(self.pid) == self.started


@functools.cache
def _kernel() -> str:
    parts = []
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return f"{platform.node()} {' '.join(parts)}"


@dataclass(frozen=True)
class Lease:
    """A right that somebody holds.

    Attributes:
        name: `lead`, or `trial N`.
        owner: Who.
        token: Changes with the owner.
        beat: Counted up while the owner lives.
    """

    name: str
    owner: Owner
    token: str
    beat: int

    @property
    def trial(self) -> int | None:
        """The number of the trial that it is for."""
        kind, _, number = self.name.partition(" ")
        return int(number) if kind == "trial" else None


def leases(storage: Storage, study_name: str) -> list[Lease]:
    """Who holds what of a study, dead or alive; nobody where no coordinator ever ran."""
    if not sqlalchemy.inspect(storage.engine).has_table(_leases.name):
        return []
    return _held(storage, study_name)


def _held(storage: Storage, study_name: str) -> list[Lease]:
    rows = select(_leases).where(_leases.c.study == study_name)

    def read() -> list[Lease]:
        with storage.engine.connect() as connection:
            return [Lease(row.name, Owner.read(row.owner), row.token, row.beat) for row in connection.execute(rows)]

    return storage.patiently(read)


class Ledger:
    """One coordinator's view of a study's claims.

    Args:
        storage: The database.
        study_name: The study; it need not be there yet.
        owner: Whose claims these are; by default this process's.

    Attributes:
        alone: Whether nobody else can be at work: SQLite, which is for one run at a time (`lock.study_lock`).
    """

    def __init__(self, storage: Storage, study_name: str, owner: Owner | None = None) -> None:
        self.storage, self.study_name, self.owner = storage, study_name, owner or Owner.here()
        self.alone = storage.is_sqlite
        self._me = str(self.owner)
        self._turn: Connection | None = None
        self._beats = False
        # Token of each lease, its latest beat, and in how many looks that has stood still; the tokens whose beat has moved.
        self._seen: dict[str, tuple[int, int]] = {}
        self._moved: set[str] = set()
        self._mine = (_leases.c.study == study_name) & (_leases.c.owner == self._me)
        storage.patiently(self._make_tables)

    def _make_tables(self) -> None:
        for _ in range(4):
            try:
                _schema.create_all(self.storage.engine)
                return
            except DBAPIError as error:  # several make them at once
                if not any(words in str(error.orig).lower() for words in MADE_MEANWHILE):
                    raise
                time.sleep(0.2)

    def is_alone(self) -> bool:
        """Whether nobody else is at work on the study now."""
        others = [] if self.alone else _held(self.storage, self.study_name)
        return all(lease.owner == self.owner or self.lives(lease) is False for lease in others)

    # Living and dead.

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Keeps this coordinator's leases alive, and watches those of others, while the block runs; may be nested."""
        if self._beats:  # looks are counted, so one thread looks
            yield
            return
        self._beats, stop = True, threading.Event()

        def beat() -> None:
            while not stop.is_set():
                with contextlib.suppress(
                    SQLAlchemyError, StoreError
                ):  # the next one will do, or whoever tells says what is wrong
                    self.look()
                stop.wait(HEARTBEAT_S)

        thread = threading.Thread(target=beat, name="autotune-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._beats = False
            stop.set()
            thread.join()

    def look(self) -> None:
        """Counts this coordinator's beats up, and notes whose stand still."""
        with self.storage.engine.begin() as connection:
            connection.execute(update(_leases).where(self._mine).values(beat=_leases.c.beat + 1))
            rows = connection.execute(select(_leases).where(_leases.c.study == self.study_name)).all()
        seen = {}
        for row in rows:
            before, still = self._seen.get(row.token, (row.beat, -1))
            if before != row.beat:
                self._moved.add(row.token)
            seen[row.token] = row.beat, still + 1 if before == row.beat else 0
        self._seen = seen

    def lives(self, lease: Lease) -> bool | None:
        """Whether the owner of a lease is at work; None if that is not known yet."""
        if lease.owner == self.owner:
            return True
        if self.alone:
            return False
        lives = lease.owner.lives()
        if lives is not None:
            return lives
        beat, still = self._seen.get(lease.token, (lease.beat, 0))
        if beat == lease.beat and still >= STALE_LOOKS:
            return False
        return True if lease.token in self._moved else None

    # Leading.

    @contextlib.contextmanager
    def leading(self, on_wait: Callable[[str], None]) -> Iterator[None]:
        """Makes this the one coordinator that measures the baseline and the finalists; waits to see whether an earlier one is dead.

        Raises:
            UserError: Another one is at work.
        """
        if self.alone:
            yield
            return
        with self.beating():
            said = False
            while not self._take_lead():
                held = self._lead()
                if held is not None and self.lives(held):
                    raise UserError(
                        f"study {self.study_name!r} is being run by {held.owner.shown}."
                        f" To help it: autotune worker {self.study_name} --storage URL"
                    )
                if held is not None and not said:
                    said = True
                    on_wait(
                        f"{held.owner.shown} ran this study; seeing whether it still does (up to {STALE_LOOKS * HEARTBEAT_S:.0f} s)"
                    )
                time.sleep(min(HEARTBEAT_S, 1.0))
            try:
                yield
            finally:
                with contextlib.suppress(SQLAlchemyError):
                    self._give_back(LEAD)

    def _lead(self) -> Lease | None:
        return next((lease for lease in _held(self.storage, self.study_name) if lease.name == LEAD), None)

    def _take_lead(self) -> bool:
        held = self._lead()
        return self._take(LEAD, None) if held is None else self.lives(held) is False and self._take(LEAD, held)

    def _take(self, name: str, held: Lease | None) -> bool:
        """Takes a lease that nobody holds, or one from a dead owner; False if somebody was quicker, or he stirred."""
        fresh = {"owner": self._me, "token": uuid.uuid4().hex, "beat": 0}
        if held is None:
            statement: Any = insert(_leases).values(study=self.study_name, name=name, **fresh)
        else:
            its = (_leases.c.study == self.study_name) & (_leases.c.name == name)
            statement = (
                update(_leases)
                .where(its & (_leases.c.token == held.token) & (_leases.c.beat == held.beat))
                .values(**fresh)
            )

        def take() -> bool:
            try:
                with self.storage.engine.begin() as connection:
                    if connection.execute(statement).rowcount == 1:
                        return True
            except IntegrityError:
                pass
            # It may have been done, and the answer lost.
            return any(lease.token == fresh["token"] for lease in _held(self.storage, self.study_name))

        return self.storage.patiently(take)

    def _give_back(self, name: str) -> None:
        with self.storage.engine.begin() as connection:
            connection.execute(delete(_leases).where(self._mine & (_leases.c.name == name)))

    def leader(self) -> Owner | None:
        """Who leads the study and is not known to be dead."""
        held = self._lead()
        return held.owner if held is not None and self.lives(held) is not False else None

    # Deciding.

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Holds every other coordinator back from deciding what to run, for as long as the block takes."""
        if self.alone:
            yield
            return
        self._turn = self.storage.patiently(self._take_turn)
        try:
            yield
        finally:
            connection, self._turn = self._turn, None
            with contextlib.suppress(SQLAlchemyError):
                connection.close()

    def _take_turn(self) -> Connection:
        connection = self.storage.engine.connect()
        row = select(_turns).where(_turns.c.study == self.study_name)
        try:
            if connection.dialect.name == "postgresql":
                connection.execute(
                    sqlalchemy.text(f"SET LOCAL idle_in_transaction_session_timeout = {LONGEST_TURN_S * 1000}")
                )
            elif connection.dialect.name in ("mysql", "mariadb"):
                connection.detach()  # the setting must not go back to the pool
                connection.execute(sqlalchemy.text(f"SET SESSION wait_timeout = {LONGEST_TURN_S}"))
            if connection.execute(row.with_for_update()).first() is None:
                connection.rollback()  # MySQL has locked the place where the row would be
                with contextlib.suppress(IntegrityError), self.storage.engine.begin() as other:
                    other.execute(insert(_turns).values(study=self.study_name))
                connection.close()
                return self._take_turn()
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_turn(self) -> None:
        if self._turn is not None:
            try:
                self._turn.execute(select(1))
            except SQLAlchemyError as error:
                raise TurnLost from error

    # Trials.

    def claim(self, study: Study, role: str) -> Trial:
        """Begins a trial, which is this coordinator's to tell."""
        token, backend = uuid.uuid4().hex, self.storage

        def begin() -> int:
            with Session(backend.engine) as session, session.begin():
                done = session.execute(select(_leases.c.name).where(self._mine & (_leases.c.token == token))).scalar()
                if done is not None:  # the answer was lost
                    number = int(done.partition(" ")[2])
                    where = (models.TrialModel.study_id == study._study_id) & (models.TrialModel.number == number)
                    return int(session.execute(select(models.TrialModel.trial_id).where(where)).scalar_one())
                models.StudyModel.find_or_raise_by_id(study._study_id, session, for_update=True)
                made = backend._get_prepared_new_trial(study._study_id, None, session)
                session.add(
                    models.TrialUserAttributeModel(trial_id=made.trial_id, key="role", value_json=json.dumps(role))
                )
                name = f"trial {made.number}"
                # What a study of the same name left.
                session.execute(delete(_leases).where((_leases.c.study == self.study_name) & (_leases.c.name == name)))
                session.execute(
                    insert(_leases).values(study=self.study_name, name=name, owner=self._me, token=token, beat=0)
                )
                return int(made.trial_id)

        trial_id = backend.patiently(begin)
        # As `study.ask` does: Optuna's samplers remember the trials that they looked at until a new one is asked for.
        study._thread_local.cached_all_trials = None
        return Trial(study, trial_id)

    def describe(
        self,
        trial: Trial,
        params: Mapping[str, Any],
        distributions: Mapping[str, BaseDistribution],
        attrs: Mapping[str, Any],
    ) -> None:
        """Notes what a claimed trial is to measure, which nobody else will be given from now on.

        Raises:
            TurnLost: It may be given to somebody else.
        """
        self._check_turn()
        trial_id = trial._trial_id
        rows = [
            {
                "trial_id": trial_id, "param_name": name, "param_value": distributions[name].to_internal_repr(value),
                "distribution_json": distribution_to_json(distributions[name]),
            }
            for name, value in params.items()
        ]  # fmt: skip

        def note() -> None:
            with Session(self.storage.engine) as session, session.begin():
                if rows:
                    session.execute(insert(models.TrialParamModel), rows)
                session.execute(insert(models.TrialUserAttributeModel), _attr_rows(trial_id, attrs))

        def note_once() -> None:
            try:
                note()
            except IntegrityError:  # the answer of the first try was lost
                if not set(attrs) <= self.storage.get_trial(trial_id).user_attrs.keys():
                    raise

        self.storage.patiently(note_once)

    def tell(
        self, trial: Trial | FrozenTrial, state: TrialState, values: Sequence[float] | None,
        attrs: Mapping[str, Any], constraints: Mapping[str, float],
    ) -> bool:  # fmt: skip
        """Ends a trial, all of it or nothing.

        Returns:
            False if it is not this coordinator's any more: it was taken for dead, and another one has ended the trial, or will.
        """
        trial_id = trial._trial_id
        system = {f"{_CONSTRAINTS_KEY}:{name}": value for name, value in constraints.items()}
        table: Any = models.TrialModel.__table__

        def end() -> bool:
            with Session(self.storage.engine) as session, session.begin():
                its = self._mine & (_leases.c.name == f"trial {trial.number}")
                if session.execute(delete(_leases).where(its)).rowcount != 1:  # type: ignore[attr-defined]
                    return self._told_by(session, trial_id) == self._me  # by this very call, and the answer was lost
                running = (table.c.trial_id == trial_id) & (table.c.state == TrialState.RUNNING)
                now = datetime.now(UTC).replace(tzinfo=None)
                ended = session.execute(update(table).where(running).values(state=state, datetime_complete=now))
                if ended.rowcount != 1:  # type: ignore[attr-defined]
                    return False  # the study was deleted, or somebody told the trial without us
                session.execute(
                    insert(models.TrialUserAttributeModel), _attr_rows(trial_id, {**attrs, TOLD_BY_ATTR: self._me})
                )
                if system:
                    session.execute(insert(models.TrialSystemAttributeModel), _attr_rows(trial_id, system))
                if values:
                    stored = [models.TrialValueModel.value_to_stored_repr(float(value)) for value in values]
                    rows = [
                        {"trial_id": trial_id, "objective": n, "value": value, "value_type": kind}
                        for n, (value, kind) in enumerate(stored)
                    ]
                    session.execute(insert(models.TrialValueModel), rows)
                return True

        return self.storage.patiently(end)

    def _told_by(self, session: Session, trial_id: int) -> str | None:
        attr = models.TrialUserAttributeModel
        text = session.execute(
            select(attr.value_json).where((attr.trial_id == trial_id) & (attr.key == TOLD_BY_ATTR))
        ).scalar()
        return None if text is None else str(json.loads(text))

    def abandoned(self, running: Sequence[FrozenTrial]) -> list[tuple[FrozenTrial, Lease | None]]:
        """Those of the running trials whose coordinator is dead."""
        if not running:
            return []
        held = {lease.trial: lease for lease in _held(self.storage, self.study_name)}
        found = [(trial, held.get(trial.number)) for trial in running]
        return [(trial, lease) for trial, lease in found if lease is None or self.lives(lease) is False]

    def take_over(self, trial: FrozenTrial, lease: Lease | None) -> bool:
        """Makes a dead coordinator's trial this one's to tell; False if it stirred, or somebody was quicker."""
        return self._take(f"trial {trial.number}", lease)


def _attr_rows(trial_id: int, attrs: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"trial_id": trial_id, "key": key, "value_json": json.dumps(value)} for key, value in attrs.items()]
