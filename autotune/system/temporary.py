"""Temporary folders of trials, named for the server that made them: one that was killed cannot remove its own."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "autotune-"
# Digits of a mark (that of its run, then its own) in a name: paths of sockets in the folder must stay short.
RUN_DIGITS, SERVER_DIGITS = 8, 4


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
