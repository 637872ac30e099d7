"""Temporary folders: of trials, named for the server that made them, which cannot remove its own if it is killed; and of logs."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "autotune-"
# Digits of a mark (that of its run, then its own) in a name: paths of sockets in the folder must stay short.
RUN_DIGITS, SERVER_DIGITS = 8, 4
# Logs that somebody was pointed to stay for a day.
KEPT_S = 86_400.0


def prefix(mark: str) -> str:
    """Returns how the names of a server's folders begin, given its mark; without its own part, those of all of its run."""
    run, dot, own = mark.partition(".")
    return f"{PREFIX}{run[:RUN_DIGITS]}" + (f"{own[:SERVER_DIGITS]}-" if dot else "")


def remove_left(mark: str) -> None:
    """Removes the folders of dead servers whose mark is the given one or begins with it."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix(mark)}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def log_folder(name: str, around: Path | None = None) -> Iterator[Path]:
    """A new temporary folder for logs, which the block removes where nobody needs them; an error of it keeps it if it names it.

    What stays is removed with the first one of that name that is made a day later.

    Args:
        around: Where it lies; by default in the folder of temporary files.
    """
    around = Path(tempfile.gettempdir()) if around is None else around
    prefix = f"{name}-{os.getuid()}-"
    for left in around.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            found = left.lstat()
            if found.st_uid == os.getuid() and found.st_mtime < time.time() - KEPT_S:
                shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=prefix, dir=around))
    try:
        yield made
    except BaseException as error:
        if made.name not in str(error):
            shutil.rmtree(made, ignore_errors=True)
        raise


@contextlib.contextmanager
def folder(name: str) -> Iterator[Path]:
    """A new temporary folder, which is removed with the block; what a killed process leaves of it, as by `log_folder`, a day later."""
    with log_folder(name) as made:
        yield made
        shutil.rmtree(made, ignore_errors=True)
