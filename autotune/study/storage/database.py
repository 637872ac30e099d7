"""Opening the study database by its URL, retries while its server is away, and plain messages for its errors."""

import contextlib
import os
import sqlite3
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import optuna
import sqlalchemy
from optuna.storages import RDBStorage
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from autotune.errors import Unavailable, UserError, printable
from autotune.study.storage import urls
from autotune.system import error_log, files, redaction

SQLITE = "sqlite:///"
BUSY_TIMEOUT_S = 60
# How long a study waits for a database that stopped answering, and the pauses between its attempts.
PATIENCE_S = 300.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
SAID_AFTER_S = 2.0
# Errors that pass without a change of the request, as SQLSTATE or MySQL's number: deadlocks, serialisation failures,
# lock timeouts, too many connections, a server that starts or stops, a lost connection.
PASSING = {
    "40001", "40P01", "55P03", "53300", "57P01", "57P02", "57P03", "25P03",
    1040, 1053, 1205, 1213, 2003, 2006, 2013, 2055,
}  # fmt: skip
PASSING_CLASS = "08"  # connection exceptions
# A server that answers with one of these refuses the request, so waiting does not help. libpq gives no code for it.
REFUSALS = (
    "authentication failed", "no password supplied", "does not exist", "no pg_hba.conf entry", "access denied",
    "unknown database", "permission denied", "not permitted",
)  # fmt: skip
PASSWORD = ("password", "access denied")
MADE_MEANWHILE = ("already exists", "duplicate key", "unique constraint", "duplicate entry")
# A server that is up but not ready yet, and how long a command waits for it.
STARTING = ("starting up", "shutting down", "in recovery mode", "not yet accepting connections", "too many clients")
STARTS_WITHIN_S = 30.0
DAMAGED = ("malformed", "not a database")  # what SQLite says of a file that is no whole database
FULL = ("disk is full", "disk full", "no space left", "table is full")
READ_ONLY, NOT_WRITTEN = ("readonly database",), ("disk i/o error",)
RECOVER = (
    "The file is no database, or damaged: restore a copy, or move it away: then `autotune run` takes up the trials in each"
    " study's folder. SQLite's command .recover saves what else can be read"
)
# What to do, by what a database says of its disk.
ADVICE = {
    DAMAGED: RECOVER,
    READ_ONLY: "Make the file and its folder writable for you; where the disk is full, free some space",
    FULL: "Free some space",
    NOT_WRITTEN: "Check the disk, which may be full, and the limit on the size of files (ulimit -f)",
}
# Code that reads rows.
READERS = ("/optuna/storages/", "/sqlalchemy/", "/autotune/study/storage/")
UNREADABLE = object()  # stands for a JSON value that cannot be read
T = TypeVar("T")

_compatible: set[str] = set()  # versions of the schema that this process has seen to be the installed Optuna's


class StoreError(UserError):
    """The database cannot be used, or lacks the study."""


class StoreMissing(StoreError):
    """The database, or the study in it, is not there."""


class StoreAway(StoreError, Unavailable):
    """The database's server has not answered for `PATIENCE_S`."""


class Storage(RDBStorage):
    """Optuna's relational storage, which tries again while the database's server is away.

    Attributes:
        patience_s: Seconds to wait for the server; 0 for a command that only reads.
        on_wait: Called once with a message when a wait gets long.
    """

    patience_s = 0.0

    def __init__(self, url: str, engine_kwargs: dict[str, Any]) -> None:
        self.on_wait: Callable[[str], None] = lambda _: None
        # Optuna takes the URL for a template, and a password may hold braces.
        template, engine = url.replace("{", "{{").replace("}", "}}"), {**engine_kwargs, "json_deserializer": _json}
        super().__init__(template, engine, skip_compatibility_check=True)
        # Optuna imports all its migrations to check a schema, so each version is checked once.
        if (version := self.get_current_version()) not in _compatible:
            self._version_manager.check_table_schema_compatibility()
            _compatible.add(version)
        if self.is_sqlite:
            sqlalchemy.event.listen(self.engine, "handle_error", _refused_in(self.shown))

    @property
    def shown(self) -> str:
        """The URL without its secrets."""
        return urls.redact_url(str(self.url))

    @property
    def is_sqlite(self) -> bool:
        """Whether the database is a file."""
        return urls.is_sqlite(str(self.url))

    def patiently(self, action: Callable[[], T]) -> T:
        """Return the action's result; repeat it with growing pauses while the database is away.

        The action may be carried out twice: a lost connection can hide that the first attempt succeeded.
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
                        f"the database {self.shown} is away ({_reason(error)});"
                        f" trying again for {self.patience_s / 60:.0f} min"
                    )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)


def _refused_in(shown: str) -> Callable[[Any], None]:
    """What turns SQLite's error about a file, damaged or not to be written to, into a sentence, wherever it is raised.

    SQLAlchemy's caches keep a dialect, and so what listens to it: neither this nor `_File` may keep the storage open.
    """

    def refused(context: Any) -> None:
        said = str(context.original_exception)
        if any(words in said for words in (*DAMAGED, *READ_ONLY)):
            raise StoreError(f"storage {shown}: {said}. {_advice(said)}") from None

    return refused


def _json(text: str) -> Any:
    try:
        return files.json_of(text)
    except ValueError:
        return UNREADABLE


def url_of(file: Path) -> str:
    """The URL of an SQLite file. SQLAlchemy takes what follows `?` for options and, from 2.1 on, `%2F` for `/`."""
    plain = f"{SQLITE}{file.as_posix()}"
    return plain if file_of(plain) == str(file) else str(sqlalchemy.URL.create("sqlite", database=str(file)))


def file_of(url: str) -> str:
    """The path of an SQLite database as its URL states it; empty if it is another one, or cannot be read."""
    with contextlib.suppress(sqlalchemy.exc.ArgumentError, ValueError):
        return (sqlalchemy.make_url(url).database or "") if urls.is_sqlite(url) else ""
    return ""


def open_storage(url: str, *, create: bool = True) -> Storage:
    """Open the database, or create it.

    SQLite uses a write-ahead log, in which readers and one writer do not block each other, and waits for locks.

    Args:
        url: SQLAlchemy's URL of the database.
        create: Whether to create a missing SQLite file; if not, one that cannot be written to is opened to be read.

    Raises:
        StoreError: The URL is wrong, its driver is missing, or the database does not answer.
    """
    connect: dict[str, Any] = {"pool_pre_ping": True}
    if urls.is_sqlite(url):
        _check_file(url, create=create)
        connect = {"connect_args": {"timeout": BUSY_TIMEOUT_S}}
        if not create and _unwritable(url):
            connect = _read_only(file_of(url))
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    full = urls.with_driver(urls.with_password(url))
    try:
        try:
            return _opened(full, connect)
        except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
            if create or not (urls.is_sqlite(url) and _has_no_room(error)):
                raise
            return _opened(full, _read_only(file_of(url)))  # which takes no log
    except ImportError:
        raise StoreError(f"storage {urls.redact_url(url)}: {_missing_driver(url)}") from None
    except UserError:
        raise
    except Exception as error:  # drivers raise errors of any type for a wrong option or host
        raise StoreError(
            f"storage {urls.redact_url(url)}: {urls.without_password(_reason(error), url)}. {_hint(url, error)}"
        ) from None


def _opened(url: str, connect: dict[str, Any]) -> Storage:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        storage = _made(url, connect)
    if urls.is_sqlite(url):
        if "creator" not in connect:
            _tune_sqlite(storage.engine)
        _File(storage)
    return storage


def _has_no_room(error: Exception) -> bool:
    """Whether SQLite could not write, as on a full disk, where it opens no write-ahead log, not even to read."""
    return any(words in _reason(error).lower() for words in (*FULL, *NOT_WRITTEN))


def _read_only(path: str) -> dict[str, Any]:
    """How SQLAlchemy opens an SQLite file where this user may not write, as SQLite does even to read a write-ahead log.

    Without a log beside it the file is whole, and taken as it is; the log of a run is read with it. So each look opens
    the file anew.
    """

    def connect() -> sqlite3.Connection:
        log = Path(f"{path}-wal")
        whole = "" if log.exists() and log.stat().st_size else "&immutable=1"
        uri = f"file:{quote(path)}?mode=ro{whole}"
        return sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, check_same_thread=False)

    return {"creator": connect, "poolclass": sqlalchemy.NullPool}


def _made(url: str, connect: dict[str, Any]) -> Storage:
    """Open the storage; try again while its server starts, or if another process is creating its tables.

    Raises:
        StoreAway: The server is still starting after `STARTS_WITHIN_S`.
    """
    until, left = time.monotonic() + STARTS_WITHIN_S, 4
    while True:
        try:
            return Storage(url, connect)
        except DBAPIError as error:
            said = str(error.orig).lower()
            starts, left = any(words in said for words in STARTING), max(0, left - 1)
            if starts and time.monotonic() > until:
                raise StoreAway(
                    f"storage {urls.redact_url(url)}: {_reason(error)}; the same command goes on later"
                ) from None
            if not starts and not (left and any(words in said for words in MADE_MEANWHILE)):
                raise
            time.sleep(0.2)


def _missing_driver(url: str) -> str:
    dialect, package = url.partition(":")[0], urls.package(url)
    how = f'. Install it: pip install "{package}"' if package else ""
    return f"SQLAlchemy's driver for {dialect} is not installed{how}"


def _hint(url: str, error: BaseException) -> str:
    said = _reason(error).lower()
    if any(words in said for words in PASSWORD):
        if redaction.HIDDEN in url or urls.with_password(url) != url:
            return f"The file does not keep the password: pass --storage URL, or set {urls.VARIABLE} or PGPASSWORD"
        return f"Check user and password in --storage or {urls.VARIABLE}"
    if "does not exist" in said or "unknown database" in said:
        return "Make it first (createdb, CREATE DATABASE); autotune makes its tables itself"
    if advice := _advice(said):
        return advice
    if isinstance(error, RuntimeError):  # of Optuna, about its table of versions
        return "Another release of optuna made it: install that, or `optuna storage upgrade --storage URL`; or restore a copy"
    if urls.is_sqlite(url) and (folder := _unwritable(url)):
        return f"To read it, try again if a run writes to it now; else make {folder} writable for you, or copy it to where you can write"
    if isinstance(error, DBAPIError) and not urls.is_sqlite(url):
        return "Is the server running, and are host and port right?"
    return "Pass a SQLAlchemy URL, for example sqlite:///studies/autotune.db or postgresql://user@host/database"


def _advice(said: str) -> str:
    """What to do about the disk that a database complains of; empty if it does not."""
    return next((todo for words, todo in ADVICE.items() if any(word in said.lower() for word in words)), "")


def _unwritable(url: str) -> Path | None:
    """The folder of an SQLite database that is there, where this user may not write to it."""
    name = file_of(url)
    return Path(name).parent if os.path.exists(name) and not os.access(Path(name).parent, os.W_OK) else None


def _check_file(url: str, *, create: bool) -> None:
    """Create the folder of an SQLite database; refuse a missing file (unless `create`) and a database in memory."""
    try:
        name = sqlalchemy.make_url(url).database
    except (sqlalchemy.exc.ArgumentError, ValueError):
        return  # opening it gives the better message
    if not name or name == ":memory:":
        gone = "it would be gone at the end of the run; name a file, for example sqlite:///studies/autotune.db"
        raise StoreError(f"storage {urls.redact_url(url)}: {gone}")
    if not create and not os.path.exists(name):
        raise StoreMissing(f"no database at {name}: nothing has been tuned there yet (or pass --storage URL)")
    try:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where = f"{error.strerror}: {Path(name).parent}; name a folder that you may write to"
        raise StoreError(f"storage {urls.redact_url(url)}: {where}") from None
    except ValueError:
        raise StoreError(f"storage {urls.redact_url(url)}: {name!r} cannot be the name of a file") from None


UNKNOWN = (-1, -1)
OR_LOST = ", and run the same command again; where it is lost, `autotune run` takes up the trials in the study's folder"


class _File:
    """Check at every use that an SQLite database is still the file that was opened.

    SQLite goes on writing to a removed file without an error. A run (`patience_s` above 0) stops when its file was
    removed or replaced; a command that only reads goes on with the new file.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = weakref.proxy(storage)
        self._path = Path(file_of(str(storage.url))).absolute()
        self._first = _identity(self._path)
        if self._first is None:
            return  # a name that only SQLite understands
        listeners = ("do_connect", self._before), ("connect", self._connected), ("checkout", self._checked_out)
        for name, listener in listeners:
            sqlalchemy.event.listen(storage.engine, name, listener)

    def _before(self, *_: object) -> None:
        if _identity(self._path) is None:  # SQLite would create an empty one
            raise StoreError(f"storage {self._storage.shown}: the file is gone. Put it back{OR_LOST}")

    def _connected(self, _: object, record: Any) -> None:
        record.info["file"] = _identity(self._path)

    def _checked_out(self, _: object, record: Any, __: object) -> None:
        now = _identity(self._path)
        if now == UNKNOWN or now == record.info.setdefault("file", self._first) == self._first:
            return
        if now is None or self._storage.patience_s > 0:
            how = "removed" if now is None else "replaced by another file"
            said = f"the file was {how} while it was in use. Put the old one back{OR_LOST}"
            raise StoreError(f"storage {self._storage.shown}: {said}")
        if now != record.info["file"]:
            raise sqlalchemy.exc.DisconnectionError("the file was replaced")


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file; None if it does not exist, `UNKNOWN` if the file system does not answer."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError:
        return UNKNOWN
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def failing_in_words(url: str) -> Iterator[None]:
    """Turn errors of SQLAlchemy, Optuna or the disk inside the block into a StoreError of one sentence."""
    try:
        yield
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        is_away = passes(error) and not urls.is_sqlite(url)
        away = f" and did not come back for {PATIENCE_S / 60:.0f} min" if is_away else ""
        advice = f". {found}" if (found := _advice(_reason(error))) else ""
        reason = urls.without_password(_reason(error), url)
        raise (StoreAway if is_away else StoreError)(
            f"storage {urls.redact_url(url)}: {reason}{away}{advice};"
            " what was told before is kept. Run the same command again to go on"
        ) from None
    except OSError as error:
        said = files.words(error)
        if said is None:
            raise
        raise StoreError(f"{said}; what was told before is kept. Run the same command again to go on") from None


def in_words(error: Exception) -> UserError | None:
    """The sentence for an error of the database, or one that a value in it caused; None for an error of another kind.

    A value that another program wrote or garbled fails where it is read: in Optuna, SQLAlchemy or this package. What fails
    elsewhere is an error of autotune itself, also where readers called it. The traceback is kept in both cases, since
    readers may err too.
    """
    if isinstance(error, SQLAlchemyError | optuna.exceptions.StorageInternalError):
        return StoreError(f"the database cannot be read: {printable(_reason(error))}; {error_log.keep(error)}")
    if not isinstance(error, LookupError | TypeError | ValueError | AttributeError) or not _is_of_reader(error):
        return None
    what = printable(str(error))[:200] or type(error).__name__
    return StoreError(
        f"the database holds a value that cannot be read ({what}): restore a copy; {error_log.keep(error)}"
    )


def _is_of_reader(error: Exception) -> bool:
    """Whether the innermost frame of an error, apart from libraries that read texts, is of code that reads rows."""
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [frame for frame in frames if any(part in frame for part in (*READERS, "/autotune/"))]
    return bool(own) and any(part in own[-1] for part in READERS)


def passes(error: BaseException) -> bool:
    """Whether a database error passes with time: the server is away or busy, and the request is valid."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, DBAPIError):
        # Optuna repeats a query over the connection that it has just lost.
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
    # No code at all: connecting failed.
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
        # NORMAL cannot corrupt a database with a write-ahead log, and results are synced to files before they are told.
        connection.execute("PRAGMA synchronous=NORMAL")

    sqlalchemy.event.listen(engine, "connect", on_connect)
    engine.dispose()
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text("PRAGMA journal_mode=WAL"))
