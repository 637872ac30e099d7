"""Temporary folders: of trials, named for the server that made them, which cannot remove its own if it is killed; and of logs."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
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


@contextlib.contextmanager
def log_folder(name: str, around: Path | None = None) -> Iterator[Path]:
    """A new temporary folder, which stays for the logs in it unless the block removes it; the next one of that name replaces it.

    Args:
        around: Where it lies; by default in the folder of temporary files.
    """
    around = Path(tempfile.gettempdir()) if around is None else around
    prefix = f"{name}-{os.getuid()}-"
    for left in around.glob(f"{prefix}*"):
        with contextlib.suppress(OSError), _held(left):  # one that another process uses is not to be had
            shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=around))
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # NFS locks no folders: there none is taken for a left one, either
            stack.enter_context(_held(made))
        # Only now under the name by which others look for left ones: before, it could not be told from one.
        yield made.rename(around / made.name.removeprefix("."))


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """Locks a folder of this user, or raises an OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            raise PermissionError(path)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
