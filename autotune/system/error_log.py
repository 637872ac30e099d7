"""Errors that nobody foresaw: the whole traceback goes to a file, and one sentence names it."""

import contextlib
import logging
import os
import platform
import shlex
import sys
import threading
import time
import traceback
from pathlib import Path

from autotune import __version__
from autotune.errors import UserError, printable
from autotune.system import files, machine, redaction

STATUS = 70  # exit status of a command that ends so (EX_SOFTWARE of sysexits.h)
MOST_LOGS = 50
MOST_CHARACTERS = 300
PACKAGE = Path(__file__).parents[1]


def keep(error: BaseException) -> str:
    """Writes the traceback of an error to a file; returns words that say where.

    Where no file can be written, the traceback goes to stderr.
    """
    text = redaction.redact(_text(error))
    try:
        folder = machine.cache_dir() / "errors"
        path = folder / f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{time.monotonic_ns() % 10**9:09}.log"
        files.write_bytes(path, text.encode(errors="backslashreplace"), private=True)  # names of files may be no UTF-8
        for old in sorted(folder.glob("*.log"))[:-MOST_LOGS]:
            with contextlib.suppress(OSError):
                old.unlink()
    except (OSError, UserError):  # of a user without a home folder
        sys.stderr.write(f"{text}\n")
        return "the traceback is above"
    return f"the traceback is in {path}"


def sentence(error: BaseException) -> str:
    """Keeps the traceback of an error of autotune itself; returns what to say of it."""
    what = printable(f"{type(error).__name__}: {error}")[:MOST_CHARACTERS]
    return (
        f"an error of autotune itself ({what}, at {_place(error)}): {keep(error)}. Please report it with that traceback;"
        " what was measured before is kept, and the same command goes on"
    )


class Handler(logging.Handler):
    """Keeps the errors that a library logs while it handles them, in place of a traceback on the terminal."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._said = threading.local()

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the error under way in this thread."""
        error = sys.exc_info()[1]
        self._said.last = keep(error) if error is not None else printable(record.getMessage())
        sys.stderr.write(f"autotune: {record.name} failed; {self._said.last}\n")

    def last(self) -> str:
        """Returns where the last error of this thread was kept; empty without one."""
        return str(getattr(self._said, "last", ""))


def _text(error: BaseException) -> str:
    # `platform.platform()` would start a process.
    versions = f"autotune {__version__}, Python {platform.python_version()}, {' '.join(os.uname()[::2])}"
    return f"{versions}\n{shlex.join(sys.argv)}\n\n{''.join(traceback.format_exception(error))}"


def _place(error: BaseException) -> str:
    """The last line of the package that the error went through."""
    places = [
        frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(PACKAGE)
    ]
    if not places:
        return "an unknown place"
    return f"{Path(places[-1].filename).relative_to(PACKAGE.parent).as_posix()}:{places[-1].lineno}"
