"""The database opened: by any URL, patient with a server that is away, and in words where it cannot be used."""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import optuna
import sqlalchemy
from optuna.storages import RDBStorage
from optuna.storages._cached_storage import _CachedStorage
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from autotune import UserError, files, masking, urls

BUSY_TIMEOUT_S = 60
# How long a database that was there may be away in the middle of a study, and the pauses between two tries.
PATIENCE_S = 300.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
SAID_AFTER_S = 2.0
# What passes by itself, as SQLSTATE or as MySQL's number: deadlocks and serialisation, lock timeouts, too many connections, a
# server that starts or stops, a connection that was lost.
PASSING = {
    "40001",
    "40P01",
    "55P03",
    "53300",
    "57P01",
    "57P02",
    "57P03",
    "25P03",
    1040,
    1053,
    1205,
    1213,
    2003,
    2006,
    2013,
    2055,
}
PASSING_CLASS = "08"
# Of a server that answers and refuses; waiting does not help. libpq gives no code where connecting fails.
REFUSALS = (
    "authentication failed", "no password supplied", "does not exist", "no pg_hba.conf entry", "access denied",
    "unknown database", "permission denied", "not permitted",
)  # fmt: skip
PASSWORD = ("password", "access denied")
MADE_MEANWHILE = ("already exists", "duplicate key", "unique constraint", "duplicate entry")
T = TypeVar("T")


class StoreError(UserError):
    """The database cannot be used, or does not hold what was asked for."""


class Storage(RDBStorage):
    """Optuna's storage, whose reads and writes are tried again where the server is away.

    Attributes:
        patience_s: For how long; 0 for a command that only reads.
        keeps: Write an SQLite file that was removed anew: whoever runs a study loses nothing of it.
        on_wait: Told once when a wait gets long.
    """

    patience_s = 0.0
    keeps = False

    def __init__(self, url: str, engine_kwargs: dict[str, Any]) -> None:
        self.on_wait: Callable[[str], None] = lambda _: None
        # Optuna fills a template in; a password may hold braces.
        super().__init__(url.replace("{", "{{").replace("}", "}}"), engine_kwargs)

    @property
    def shown(self) -> str:
        """The URL without its secrets."""
        return urls.masked(str(self.url))

    @property
    def is_sqlite(self) -> bool:
        """Whether the database is a file."""
        return urls.is_sqlite(str(self.url))

    def patiently(self, action: Callable[[], T]) -> T:
        """What the action returns; it is repeated, with growing pauses, while the database is away.

        The action may have been done although its answer was lost, so it must be one that can be done twice.
        """
        began, pause, said = time.monotonic(), FIRST_PAUSE_S, False
        while True:
            try:
                return action()
            except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
                waited = time.monotonic() - began
                if not passes(error) or waited + pause > self.patience_s:
                    raise
                if not said and waited > SAID_AFTER_S:
                    said = True
                    self.on_wait(
                        f"the database {self.shown} is away ({_reason(error)}); trying again for {self.patience_s / 60:.0f} min"
                    )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)


def _patient(method: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(method)
    def patient(self: Storage, *args: Any, **kwargs: Any) -> T:
        return self.patiently(lambda: method(self, *args, **kwargs))

    return patient


# All that can be done twice; trials are created and told by `claims`.
for _name in (
    "create_new_study", "set_study_user_attr", "set_study_system_attr", "get_study_id_from_name", "get_study_name_from_id",
    "get_study_directions", "get_study_user_attrs", "get_study_system_attrs", "get_all_studies", "set_trial_user_attr",
    "set_trial_system_attr", "get_trial_user_attrs", "get_trial_system_attrs", "get_trial", "get_all_trials", "_get_trials",
    "get_trial_id_from_study_id_trial_number",
):  # fmt: skip
    setattr(Storage, _name, _patient(getattr(RDBStorage, _name)))


class Cached(_CachedStorage):
    """Optuna's cache of trials, which asks the database for news at every look, unless it is told to hold still."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self._holds = False

    def _read_trials_from_remote_storage(self, study_id: int) -> None:
        if not self._holds:
            super()._read_trials_from_remote_storage(study_id)

    @contextlib.contextmanager
    def still(self, study_id: int, *, news: bool = True) -> Iterator[None]:
        """Asks once, and shows the same trials for as long as the block takes.

        Args:
            study_id: The study.
            news: False shows the trials as they were last seen.
        """
        if news:
            self._read_trials_from_remote_storage(study_id)
        before, self._holds = self._holds, True
        try:
            yield
        finally:
            self._holds = before


def open_storage(url: str, *, create: bool = True) -> Storage:
    """Opens (or makes) the database.

    SQLite is put into write-ahead mode, in which readers and one writer do not block each other, and waits for a lock
    instead of failing.

    Raises:
        StoreError: The URL is wrong, its driver is missing, or the database does not answer.
    """
    if urls.is_sqlite(url):
        _check_file(url, create=create)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    connect = {"connect_args": {"timeout": BUSY_TIMEOUT_S}} if urls.is_sqlite(url) else {"pool_pre_ping": True}
    full = urls.with_driver(urls.unmasked(url))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            storage = _made(full, connect)
        if urls.is_sqlite(url):
            _tune_sqlite(storage.engine)
            _File(storage)
    except ImportError:
        raise StoreError(f"storage {urls.masked(url)}: {_missing_driver(url)}") from None
    except UserError:
        raise
    except Exception as error:  # drivers raise whatever they like at an option or a host that is none
        raise StoreError(
            f"storage {urls.masked(url)}: {urls.without_password(_reason(error), url)}. {_hint(url, error)}"
        ) from None
    return storage


def _made(url: str, connect: dict[str, Any]) -> Storage:
    """The storage; several that make its tables at once get in one another's way, and try again."""
    for _ in range(4):
        try:
            return Storage(url, connect)
        except DBAPIError as error:
            if not any(words in str(error.orig).lower() for words in MADE_MEANWHILE):
                raise
            time.sleep(0.2)
    return Storage(url, connect)


def _missing_driver(url: str) -> str:
    dialect, extra = url.partition(":")[0], urls.extra(url)
    how = f'. Install it: pip install "autotune[{extra}]"' if extra else ""
    return f"SQLAlchemy's driver for {dialect} is not installed{how}"


def _hint(url: str, error: BaseException) -> str:
    said = _reason(error).lower()
    if any(words in said for words in PASSWORD):
        if masking.HIDDEN in url or urls.unmasked(url) != url:
            return f"The file does not keep the password: pass --storage URL, or set {urls.VARIABLE} or PGPASSWORD"
        return f"Check user and password in --storage or {urls.VARIABLE}"
    if "does not exist" in said or "unknown database" in said:
        return "Make it first (createdb, CREATE DATABASE); autotune makes its tables itself"
    if isinstance(error, DBAPIError) and not urls.is_sqlite(url):
        return "Is the server running, and are host and port right?"
    return "Pass a SQLAlchemy URL, for example sqlite:///studies/autotune.db or postgresql://user@host/database"


def _check_file(url: str, *, create: bool) -> None:
    """Makes the folder of an SQLite database, or refuses a database that is not there or would not stay."""
    try:
        name = sqlalchemy.make_url(url).database
    except (sqlalchemy.exc.ArgumentError, ValueError):
        return  # said better by who opens it
    if not name or name == ":memory:":
        gone = "it would be gone at the end of the run; name a file, for example sqlite:///studies/autotune.db"
        raise StoreError(f"storage {urls.masked(url)}: {gone}")
    if not create and not os.path.exists(name):
        raise StoreError(f"no database at {name}: nothing has been tuned there yet (or pass --storage URL)")
    try:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where = f"{error.strerror}: {Path(name).parent}; name a folder that you may write to"
        raise StoreError(f"storage {urls.masked(url)}: {where}") from None
    except ValueError:
        raise StoreError(f"storage {urls.masked(url)}: {name!r} cannot be the name of a file") from None


UNKNOWN = (-1, -1)
# Files that this process has put in the place of removed ones.
_written_anew: set[tuple[int, int] | None] = set()


class _File:
    """Sees whether an SQLite database is still the file that was opened: a removed one goes on being written to, and nobody would know.

    Args:
        storage: The database.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage, self._lock = storage, threading.Lock()
        self._path = Path(str(sqlalchemy.make_url(str(storage.url)).database)).absolute()
        self._first = _identity(self._path)
        if self._first is None:
            return  # a name that only SQLite understands
        self._own: set[tuple[int, int] | None] = {self._first}
        for name, listener in (
            ("do_connect", self._before),
            ("connect", self._connected),
            ("checkout", self._checked_out),
        ):
            sqlalchemy.event.listen(storage.engine, name, listener)

    def _before(self, *_: object) -> None:
        if _identity(self._path) is None:  # SQLite would make an empty one
            raise StoreError(
                f"storage {self._storage.shown}: the file is gone. Put it back, and run the same command again"
            )

    def _connected(self, _: object, record: Any) -> None:
        record.info["file"] = _identity(self._path)

    def _checked_out(self, connection: sqlite3.Connection, record: Any, _: object) -> None:
        if (now := _identity(self._path)) == record.info.setdefault("file", self._first) or now == UNKNOWN:
            return
        with self._lock:  # several threads may find out at once
            now = _identity(self._path)
            if now is None and self._storage.keeps:
                now = self._write_anew(connection)
            elif now is not None and not self._storage.keeps:
                self._own.add(now)  # who only reads, reads what is there
            if now not in self._own and now not in _written_anew:
                how = "removed" if now is None else "replaced by another one"
                said = f"the file was {how} while it was in use. Put the old one back, and run the same command again"
                raise StoreError(f"storage {self._storage.shown}: {said}")
        raise sqlalchemy.exc.DisconnectionError("the file was written anew")

    def _write_anew(self, connection: sqlite3.Connection) -> tuple[int, int] | None:
        """Copies what a connection still holds of the removed file to its place."""
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            draft.unlink(missing_ok=True)
            with contextlib.closing(sqlite3.connect(draft)) as copy:
                connection.backup(copy)
            for ending in ("-wal", "-shm"):  # of the removed file; SQLite would take them for the new one's
                self._path.with_name(self._path.name + ending).unlink(missing_ok=True)
            os.replace(draft, self._path)
        except (OSError, sqlite3.Error) as error:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise StoreError(
                f"storage {self._storage.shown}: the file was removed while the study ran, and cannot be written anew: {error}"
            ) from None
        found = _identity(self._path)
        _written_anew.add(found)
        self._storage.on_wait(
            f"the database {self._storage.shown} was removed; it was written anew, and nothing of it is lost"
        )
        return found


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a file from another one of its name; None where there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError:  # a file system that does not answer has not lost the file
        return UNKNOWN
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def failing_in_words(url: str) -> Iterator[None]:
    """A database or a disk that fails in the middle of a run (full, taken away) ends it with a sentence.

    Raises:
        StoreError: In place of whatever SQLAlchemy, Optuna or the disk raised.
    """
    try:
        yield
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        away = (
            f" and did not come back for {PATIENCE_S / 60:.0f} min" if passes(error) and not urls.is_sqlite(url) else ""
        )
        full = ". Free some space" if "disk is full" in _reason(error) else ""
        reason = urls.without_password(_reason(error), url)
        raise StoreError(
            f"storage {urls.masked(url)}: {reason}{away}{full}; what was told before is kept. Run the same command again to go on"
        ) from None
    except OSError as error:
        said = files.words(error)
        if said is None:
            raise
        raise StoreError(f"{said}; what was told before is kept. Run the same command again to go on") from None


def passes(error: BaseException) -> bool:
    """Whether a database error is one that passes by itself: the server is away or busy, and nothing is wrong with the request."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, DBAPIError):
        # Optuna asks once more over a connection that it has just lost.
        if isinstance(cause, sqlalchemy.exc.PendingRollbackError):
            return True
        cause = cause.__cause__
    if cause is None:
        return isinstance(error, sqlalchemy.exc.TimeoutError)
    said = str(cause.orig).lower()
    if cause.connection_invalidated or "database is locked" in said:
        return True
    state, number = getattr(cause.orig, "sqlstate", None), next(iter(getattr(cause.orig, "args", ())), None)
    if state in PASSING or number in PASSING or (isinstance(state, str) and state.startswith(PASSING_CLASS)):
        return True
    # Connecting failed, and no code says why.
    unknown = state is None and not isinstance(number, int) and "sqlite3" not in type(cause.orig).__module__
    connecting = isinstance(cause, sqlalchemy.exc.OperationalError | sqlalchemy.exc.InterfaceError) and unknown
    return connecting and not any(words in said for words in REFUSALS)


def _reason(error: BaseException) -> str:
    if isinstance(error, optuna.exceptions.StorageInternalError) and error.__cause__ is not None:
        error = error.__cause__
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
