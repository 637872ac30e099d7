"""Files that are whole: a reader sees the old one or the new one, and a disk that fails is named in words."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

# What a disk may answer, and what the user can do about it.
REMEDIES = {
    errno.ENOSPC: "Free some space",
    errno.EDQUOT: "Free some of your quota",
    errno.EFBIG: "Raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "Make it writable, or work in another folder",
    errno.EACCES: "Make it writable for you, or work in another folder",
    errno.EPERM: "Make it writable for you, or work in another folder",
    errno.EIO: "See what is wrong with the disk",
}
# A file system with less room than this is full: what failed on it says nothing about who tried.
LEAST_FREE_BYTES = 1 << 20
QUOTA = os.strerror(errno.EDQUOT).lower()


def write_text(path: Path, text: str, *, sync: bool = True, private: bool = False) -> None:
    """Writes a text in UTF-8; see `write_bytes`."""
    write_bytes(path, text.encode(), sync=sync, private=private)


def write_bytes(path: Path, data: bytes, *, sync: bool = True, private: bool = False) -> None:
    """Writes a file by renaming a draft: a reader sees the old one or the new one, whole.

    Args:
        path: The file; its folder is made. Behind a link its goal is written; a device or a pipe is written to as it is.
        data: Its content.
        sync: Wait until the content is on disk, so that it also outlives a crash of the machine.
        private: Nobody else may read it, from the first byte on.

    Raises:
        OSError: The disk refused it; it names the file, and no draft is left.
    """
    with naming(path):
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        goal = path.resolve() if path.is_symlink() else path
        goal.parent.mkdir(parents=True, exist_ok=True)
        draft = goal.with_name(f".{goal.name[:200]}.{os.getpid()}")
        try:
            with open(draft, "wb", opener=_privately if private else None) as file:
                file.write(data)
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(draft, goal)
        except BaseException as error:
            with contextlib.suppress(OSError):
                draft.unlink()
            if isinstance(error, OSError) and error.filename == str(draft):
                error.filename = str(path)
            raise
        if sync:
            _sync_folder(goal.parent)


def _privately(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync_folder(folder: Path) -> None:
    """Without it the renaming itself may not outlive a crash of the machine."""
    with contextlib.suppress(OSError):  # some network file systems know no such thing
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_drafts(folder: Path) -> None:
    """Removes what writers left that were killed in the middle."""
    for path in folder.glob(".*"):
        found = re.fullmatch(r"\..+\.(\d+)", path.name)
        if found and not Path("/proc", found[1]).exists():
            with contextlib.suppress(OSError):
                path.unlink()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives an error of the disk the name of the file, which Python leaves out where a write or a sync fails."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def words(error: OSError) -> str | None:
    """What a file or its disk answered, and what to do; None where the error is of another kind."""
    if error.filename is None and error.errno not in REMEDIES:
        return None
    said = error.strerror or type(error).__name__
    said = said if error.filename is None else f"{os.fsdecode(error.filename)}: {said}"
    return f"{said}. {REMEDIES[error.errno]}" if error.errno in REMEDIES else said


def check_space(path: Path, reason: str = "") -> None:
    """Refuses to take a failure for anything else where the disk was full.

    Args:
        path: A file or folder on that disk.
        reason: What the failure said.

    Raises:
        OSError: The disk, or the user's share of it, is full.
    """
    if QUOTA in reason.lower():
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))
    if _is_full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _is_full(path: Path) -> bool:
    try:
        found = os.statvfs(path)
    except OSError:
        return False
    root = os.geteuid() == 0  # a part is kept for root alone
    blocks, files = (found.f_bfree, found.f_ffree) if root else (found.f_bavail, found.f_favail)
    return blocks * found.f_frsize < LEAST_FREE_BYTES or (found.f_files > 0 and files == 0)


def tail(path: Path, most: int, *, whole: bool = False) -> bytes | None:
    """The end of a file that somebody else wrote, who may have put anything in its place.

    Args:
        path: The file.
        most: Bytes at most.
        whole: A longer file is none.

    Returns:
        Its last bytes; None where no plain file can be read without waiting.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or (whole and found.st_size > most):
                return None
            file.seek(max(0, found.st_size - most))
            return file.read(most)
    except OSError:
        return None
