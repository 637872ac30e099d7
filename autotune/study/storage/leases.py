"""Leases in the database: which process leads a study, runs a trial, or runs the schedules.

A row of `autotune_leases` is a right. Its owner increments the row's `beat` while it works. A lease whose beat stood
still for several looks in a row belongs to a dead process, and another process may take it over. Looks count only while
the database answers, so neither an outage nor a wrong clock makes an owner look dead.
"""

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy
from optuna.distributions import BaseDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy import Connection, Engine, delete, insert, select, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from autotune.errors import UserError
from autotune.study.storage import tables
from autotune.study.storage.database import Storage, StoreError
from autotune.study.storage.optuna_tables import constraint_attrs, trial_id, write_trial
from autotune.system.owner import Owner

HEARTBEAT_S = 5.0
STALE_LOOKS = 12  # looks without a beat after which an owner counts as dead: a minute of heartbeats
# The coordinator that decides holds a transaction open; one that vanished must not hold it for ever.
LONGEST_TURN_S = 120
LEAD = "lead"
TOLD_BY_ATTR = "told_by"
SYSTEM_PREFIX = "autotune:"  # attributes for programs, which dashboards do not list
ROWS = tables.LEASE.c


class TurnLost(Exception):
    """The turn ended while its holder was still deciding; the decision must not be carried out."""


@dataclass(frozen=True)
class Lease:
    """A right and its owner.

    Attributes:
        name: `lead`, `trial N`, `place` of machines, or `scheduler`.
        token: Changes with the owner.
        beat: Incremented while the owner works.
    """

    name: str
    owner: Owner
    token: str
    beat: int

    @property
    def trial(self) -> int | None:
        """Number of the trial that it is for."""
        kind, _, number = self.name.partition(" ")
        return int(number) if kind == "trial" else None


class Leases:
    """The leases of one study, or of the scheduler, as one process sees them.

    Args:
        scope: Name of the study; empty for the scheduler.
        owner: The process; by default this one.
        stale_looks: Looks without a beat after which an owner counts as dead.
    """

    def __init__(self, engine: Engine, scope: str, owner: Owner | None = None, stale_looks: int = STALE_LOOKS) -> None:
        self.engine, self.scope, self.owner, self.stale_looks = engine, scope, owner or Owner.here(), stale_looks
        # By token: the latest beat, and the number of looks for which it has stood still.
        self._seen: dict[str, tuple[int, int]] = {}
        self._moved: set[str] = set()  # tokens whose beat has changed
        self._mine = (ROWS.study == scope) & (ROWS.owner == str(self.owner))

    def held(self) -> list[Lease]:
        """Every lease, of living and dead owners."""
        with self.engine.connect() as connection:
            rows = connection.execute(select(tables.LEASE).where(ROWS.study == self.scope))
            return [Lease(row.name, Owner.read(row.owner), row.token, row.beat) for row in rows]

    def look(self) -> None:
        """Increment this owner's beats, and count the looks for which the beats of others stood still."""
        with self.engine.begin() as connection:
            connection.execute(update(tables.LEASE).where(self._mine).values(beat=ROWS.beat + 1))
        seen = {}
        for lease in Leases.held(self):  # without patience: the next look comes soon
            before, still = self._seen.get(lease.token, (lease.beat, -1))
            if before != lease.beat:
                self._moved.add(lease.token)
            seen[lease.token] = lease.beat, still + 1 if before == lease.beat else 0
        self._seen = seen

    def lives(self, lease: Lease) -> bool | None:
        """Whether the owner of a lease is at work; None until enough looks can tell."""
        if lease.owner == self.owner:
            return True
        lives = lease.owner.lives()
        if lives is not None:
            return lives
        beat, still = self._seen.get(lease.token, (lease.beat, 0))
        if beat == lease.beat and still >= self.stale_looks:
            return False
        return True if lease.token in self._moved else None

    def acquire(self, name: str) -> bool:
        """Take a lease that is free or belongs to a dead owner; whether this owner holds it now."""
        held = next((lease for lease in self.held() if lease.name == name), None)
        if held is not None and held.owner == self.owner:
            return True
        return self.take(name, held) if held is None or self.lives(held) is False else False

    def take(self, name: str, held: Lease | None) -> bool:
        """Take over a lease that has not changed since it was seen.

        Args:
            held: The lease as it was seen; None if it was free.

        Returns:
            Whether this owner has it now: False if another process took it first, or its owner gave a beat.
        """
        fresh = {"owner": str(self.owner), "token": uuid.uuid4().hex, "beat": 0}
        if held is None:
            statement: Any = insert(tables.LEASE).values(study=self.scope, name=name, **fresh)
        else:
            same = (ROWS.token == held.token) & (ROWS.beat == held.beat)
            its = (ROWS.study == self.scope) & (ROWS.name == name)
            statement = update(tables.LEASE).where(its & same).values(**fresh)
        return self._took(statement) or any(lease.owner == self.owner for lease in self.held() if lease.name == name)

    def _took(self, statement: Any) -> bool:
        try:
            with self.engine.begin() as connection:
                return bool(connection.execute(statement).rowcount == 1)
        except IntegrityError:
            return False

    def _renewed(self, connection: Connection, name: str) -> bool:
        """Give a beat for a lease, so that it cannot be taken over as it was seen before; False if it is lost."""
        beat = update(tables.LEASE).where(self._mine & (ROWS.name == name)).values(beat=ROWS.beat + 1)
        return connection.execute(beat).rowcount == 1

    def give_back(self, name: str) -> None:
        """End a lease of this owner."""
        with self.engine.begin() as connection:
            connection.execute(delete(tables.LEASE).where(self._mine & (ROWS.name == name)))


def leases(storage: Storage, study_name: str) -> list[Lease]:
    """The leases of a study, of living and dead owners; none in a database where no study has run."""
    if not sqlalchemy.inspect(storage.engine).has_table(tables.LEASE.name):
        return []
    return storage.patiently(Leases(storage.engine, study_name).held)


class StudyLeases(Leases):
    """One coordinator's leases on a study: leading it, deciding in turn, and its trials.

    Args:
        study_name: The study, which need not exist yet.
        owner: The coordinator; by default this process.

    Attributes:
        alone: Whether no other process can be at work: always with SQLite, which one run at a time uses
            (`lock.study_lock`).
    """

    def __init__(self, storage: Storage, study_name: str, owner: Owner | None = None) -> None:
        super().__init__(storage.engine, study_name, owner)
        self.storage, self.study_name, self.alone = storage, study_name, storage.is_sqlite
        self._turn: Connection | None = None
        self._beats = False
        storage.patiently(lambda: tables.migrate(storage.engine))

    def held(self) -> list[Lease]:
        """Every lease on the study, of living and dead owners."""
        return self.storage.patiently(super().held)

    def lives(self, lease: Lease) -> bool | None:
        """Whether the owner of a lease is at work; None until enough looks can tell."""
        return lease.owner == self.owner if self.alone else super().lives(lease)

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Keep this coordinator's leases alive, and watch those of others, during the block; may be nested."""
        if self.alone or self._beats:  # one thread at a time, since looks are counted
            yield
            return
        self._beats, stop = True, threading.Event()

        def beat() -> None:
            while not stop.is_set():
                with contextlib.suppress(SQLAlchemyError, StoreError):  # the next look may succeed
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

    @contextlib.contextmanager
    def leading(self, on_wait: Callable[[str], None]) -> Iterator[None]:
        """Make this process the leader, which measures the baseline and the finalists.

        Args:
            on_wait: Called once with a message if it must first be found out whether an earlier leader is dead.

        Raises:
            UserError: Another process leads the study.
        """
        if self.alone:
            yield
            return
        with self.beating():
            said = False
            while not self.storage.patiently(lambda: self.acquire(LEAD)):
                held = self._lead()
                if held is not None and self.lives(held):
                    raise UserError(
                        f"study {self.study_name!r} is being run by {held.owner.shown}."
                        f" To help it: autotune worker {self.study_name} --storage URL"
                    )
                if held is not None and not said:
                    said, longest_s = True, STALE_LOOKS * HEARTBEAT_S
                    on_wait(
                        f"{held.owner.shown} ran this study; checking whether it still does (up to {longest_s:.0f} s)"
                    )
                time.sleep(min(HEARTBEAT_S, 1.0))
            try:
                yield
            finally:
                with contextlib.suppress(SQLAlchemyError):
                    self.give_back(LEAD)

    def _lead(self) -> Lease | None:
        return next((lease for lease in self.held() if lease.name == LEAD), None)

    def leader(self) -> Owner | None:
        """The process that leads the study, unless it is known to be dead."""
        held = self._lead()
        return held.owner if held is not None and self.lives(held) is not False else None

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let no other coordinator decide what to run next during the block."""
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
        """Lock the study's row for turns; its scope is not the study's, so that a locked turn delays no heartbeat."""
        scope = f"turn {self.study_name}"
        connection = self.engine.connect()
        try:
            if connection.dialect.name == "postgresql":
                limit = f"SET LOCAL idle_in_transaction_session_timeout = {LONGEST_TURN_S * 1000}"
                connection.execute(sqlalchemy.text(limit))
            elif connection.dialect.name in ("mysql", "mariadb"):
                connection.detach()  # the setting must not go back to the pool
                connection.execute(sqlalchemy.text(f"SET SESSION wait_timeout = {LONGEST_TURN_S}"))
            if connection.execute(select(tables.LEASE).where(ROWS.study == scope).with_for_update()).first() is None:
                connection.rollback()  # MySQL has locked the gap in which the row goes
                row = {"study": scope, "name": "turn", "owner": "", "token": "", "beat": 0}
                self._took(insert(tables.LEASE).values(**row))
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

    def claim(self, study: Study) -> Trial:
        """Begin a trial with a lease on it, during a `turn`, so that nobody sees the trial without its lease."""
        trial = study.ask()
        name = f"trial {trial.number}"
        row = {"study": self.scope, "name": name, "owner": str(self.owner), "token": uuid.uuid4().hex, "beat": 0}

        def begin() -> None:
            with self.engine.begin() as connection:
                # A deleted study of the same name may have left a lease.
                connection.execute(delete(tables.LEASE).where((ROWS.study == self.scope) & (ROWS.name == name)))
                connection.execute(insert(tables.LEASE).values(**row))

        self.storage.patiently(begin)
        return trial

    def describe(
        self, trial: Trial, params: Mapping[str, tuple[Any, BaseDistribution]], attrs: Mapping[str, Any]
    ) -> None:
        """Write down in one transaction what a claimed trial measures, which reserves it.

        Args:
            params: Value and distribution of each parameter.
            attrs: User attributes of the trial.

        Raises:
            TurnLost: This process lost its turn, so another coordinator may be choosing the same candidate now.
        """
        self._check_turn()

        def describe() -> None:
            with self.engine.begin() as connection:
                write_trial(connection, trial_id(trial), params=params, user_attrs=attrs)

        self.storage.patiently(describe)

    def tell(
        self, trial: Trial | FrozenTrial, state: TrialState, values: Sequence[float] | None,
        attrs: Mapping[str, Any], constraints: Mapping[str, float],
    ) -> bool:  # fmt: skip
        """End a trial: its attributes first, its state once, so that an interrupted call can be repeated.

        Args:
            values: Values of the objectives, of a complete trial.
            attrs: Its attributes; those with `SYSTEM_PREFIX` are for programs.
            constraints: Violations of constraints by name: satisfied at 0 and below.

        Returns:
            False if the trial is another coordinator's by now: this one was taken for dead.

        Raises:
            KeyError: The study was deleted.
        """
        number, name = trial_id(trial), f"trial {trial.number}"
        system = {key: value for key, value in attrs.items() if key.startswith(SYSTEM_PREFIX)}
        user = {key: value for key, value in attrs.items() if key not in system} | {TOLD_BY_ATTR: str(self.owner)}
        system |= constraint_attrs(constraints)

        def end() -> bool:
            try:
                with self.engine.begin() as connection:
                    if not self._renewed(connection, name):
                        return self._told(number)
                    write_trial(connection, number, user_attrs=user, system_attrs=system)
                self.storage.set_trial_state_values(number, state, values)
                told = True
            except UpdateFinishedTrialError:  # by an earlier attempt, or by another coordinator
                told = self._told(number)
            self.give_back(name)
            return told

        return self.storage.patiently(end)

    def _told(self, number: int) -> bool:
        """Whether this coordinator has ended a trial, in an attempt whose answer was lost."""
        trial = self.storage.get_trial(number)
        return trial.state.is_finished() and trial.user_attrs.get(TOLD_BY_ATTR) == str(self.owner)

    def abandoned(self, running: Sequence[FrozenTrial]) -> list[tuple[FrozenTrial, Lease | None]]:
        """The running trials whose coordinator is dead, each with its lease."""
        held = {lease.trial: lease for lease in self.held() if lease.trial is not None}
        dead = {number: lease for number, lease in held.items() if self.lives(lease) is False}
        for number in dead.keys() - {trial.number for trial in running}:  # their owner died after the trial's end
            self._took(delete(tables.LEASE).where((ROWS.study == self.scope) & (ROWS.token == dead[number].token)))
        free = [trial for trial in running if trial.number not in held and self._runs(trial)]
        return [(trial, dead[trial.number]) for trial in running if trial.number in dead] + [(t, None) for t in free]

    def _runs(self, trial: FrozenTrial) -> bool:
        """Whether a trial still runs: it may have ended, and its lease with it, since it was read."""
        with contextlib.suppress(KeyError):
            found = self.storage.patiently(lambda: self.storage.get_trial(trial_id(trial)))
            return found.state is TrialState.RUNNING
        return False

    def take_over(self, trial: FrozenTrial, lease: Lease | None) -> bool:
        """Take a dead coordinator's trial over; False if it gave a beat, or another process was quicker."""
        return self.storage.patiently(lambda: self.take(f"trial {trial.number}", lease))
