"""Files: atomic writes, reads of files that a user names, and a disk's errors in words."""

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from autotune.errors import SpecError, nearest, printable, shortened
from autotune.system.units import format_bytes

# Advice for the user by the error of a disk.
REMEDIES = {
    errno.ENOSPC: "Free some space",
    errno.EDQUOT: "Free some of your quota",
    errno.EFBIG: "Raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "Make it writable, or work in another folder",
    errno.EACCES: "Make it writable for you, or work in another folder",
    errno.EPERM: "Make it writable for you, or work in another folder",
    errno.EIO: "Check the disk",
}
# Free space below which a failure may be due to the disk.
LEAST_FREE_BYTES = 1 << 20
# A larger file was not written by autotune: results hold some hundred kilobytes.
LARGEST_WRITTEN_BYTES = 64 << 20
# A draft of another host that nothing was written to for this long has no writer any more.
DRAFT_AGE_S = 300.0
QUOTA = os.strerror(errno.EDQUOT).lower()


def write_text(path: Path, text: str, *, sync: bool = True, private: bool = False, named: bool = False) -> None:
    """Writes a text in UTF-8, atomically; see `write_bytes`."""
    write_bytes(path, text.encode(), sync=sync, private=private, named=named)


def write_bytes(path: Path, data: bytes, *, sync: bool = True, private: bool = False, named: bool = False) -> None:
    """Writes a file atomically, by renaming a draft: a reader sees the old content or the new, whole.

    Args:
        path: The file; its folder is made. A link to a file beside it is followed; one that leads elsewhere is replaced,
            since a study's folder may be somebody else's.
        sync: Wait until the content is on disk, so that it outlives a crash of the machine.
        private: Only this user may read it.
        named: The user named this very file: any link is followed, a device or a pipe is written to directly.

    Raises:
        OSError: The disk refused it, or it is no regular file. The error names the file, and no draft is left.
    """
    with naming(path):
        if path.exists() and not path.is_file():
            if not (named or path.is_dir()):
                raise OSError(errno.EEXIST, "Is a pipe, a socket or a device; remove it", str(path))
            path.write_bytes(data)
            return
        goal = path.resolve() if path.is_symlink() else path
        goal = goal if named or goal.parent == path.parent.resolve() else path
        with replacing(goal, sync=sync, mode=0o600 if private else 0o666) as file:
            file.write(data)


def draft_of(goal: Path) -> Path:
    """The draft of a file that this thread writes: two may write the same one; cut, since a name has at most 255 bytes."""
    return goal.with_name(f".{goal.name[:50]}.{_namespace()}.{threading.get_native_id()}.{os.getpid()}")


@functools.cache
def _namespace() -> str:
    """Names the host, or the container, whose PIDs are those of this /proc."""
    pids = ""
    with contextlib.suppress(OSError):  # a sandbox may hide it
        pids = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(f"{os.uname().nodename} {pids}".encode()).hexdigest()[:8]


@contextlib.contextmanager
def replacing(goal: Path, *, sync: bool = True, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A draft to write to, which replaces the file at the end of the block; no draft is left of a block that fails."""
    goal.parent.mkdir(parents=True, exist_ok=True)
    draft = draft_of(goal)
    try:
        with open(draft, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, goal)
    except BaseException as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        if isinstance(error, OSError) and error.filename == str(draft):
            error.filename = str(goal)
        raise
    if sync:
        _sync_folder(goal.parent)


def _sync_folder(folder: Path) -> None:
    """Syncs a folder; without it a renaming may be lost in a crash of the machine."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:  # some network file systems cannot
        descriptor = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        os.fsync(descriptor)


def remove_drafts(folder: Path) -> None:
    """Removes the drafts of killed writers, also in folders below; of another host's those that are old."""
    for path in folder.rglob(".*"):
        found = re.fullmatch(r"\..+?(\.[0-9a-f]{8})?\.\d+\.(\d+)", path.name)
        if found and not Path("/proc", found[2]).exists():
            with contextlib.suppress(OSError):
                if found[1] == f".{_namespace()}" or time.time() - path.lstat().st_mtime > DRAFT_AGE_S:
                    path.unlink()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the name of the file to an OSError; Python leaves it out if a write or a sync fails."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def words(error: OSError) -> str | None:
    """Returns the error of a file or its disk, with advice; None if the error is not about a file."""
    if error.filename is None and error.errno not in REMEDIES:
        return None
    said = error.strerror or type(error).__name__
    said = said if error.filename is None else printable(f"{os.fsdecode(error.filename)}: {said}")
    return f"{said}. {REMEDIES[error.errno]}" if error.errno in REMEDIES else said


def check_space(path: Path, reason: str = "") -> None:
    """Raises an OSError if a failure may be due to a full disk, or the user's quota."""
    if QUOTA in reason.lower():
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))
    if _is_full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _is_full(path: Path) -> bool:
    try:
        found = os.statvfs(path)
    except OSError:
        return False
    root = os.geteuid() == 0  # some blocks are reserved for root
    blocks, files = (found.f_bfree, found.f_ffree) if root else (found.f_bavail, found.f_favail)
    return blocks * found.f_frsize < LEAST_FREE_BYTES or (found.f_files > 0 and files == 0)


def tail(path: Path, most: int, *, whole: bool = False) -> bytes | None:
    """Returns the end of a file without waiting, even if a user's code replaced it by a pipe or a device.

    Args:
        most: Bytes at most.
        whole: Refuse a longer file.

    Returns:
        The last bytes; None if it is not a regular file that can be read.
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


def read_regular(path: Path) -> bytes:
    """Returns the content of a file that a program wrote, without waiting for a pipe.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not a regular file, cannot be read, or is larger than any file that autotune writes.
    """
    if (found := tail(path, LARGEST_WRITTEN_BYTES, whole=True)) is not None:
        return found
    if not os.path.lexists(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    raise ValueError(f"{path} is no regular file of at most {format_bytes(LARGEST_WRITTEN_BYTES)} that can be read")


def json_of(text: str | bytes) -> Any:
    """Returns the value of a JSON text that a program wrote.

    Raises:
        ValueError: The text is not JSON, or is nested more deeply than Python reads.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("JSON that is nested without end") from None


def json_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file of another process; empty while that is missing or being written."""
    try:
        return dict(json.loads(path.read_text()))
    except (FileNotFoundError, ValueError):
        return {}


def last_line(path: Path) -> str:
    """Returns the last line of a log that is not blank, at most 300 characters; `it said nothing` without one."""
    lines = [line.strip() for line in (tail(path, 4096) or b"").decode(errors="replace").splitlines() if line.strip()]
    return shortened(lines[-1], 300) if lines else "it said nothing"


def shown(path: Path) -> Path:
    """Returns a path for people: relative if it lies below the working directory."""
    with contextlib.suppress(ValueError):
        return path.relative_to(Path.cwd())
    return path


def absolute(path: Any, folder: Path, where: str) -> Path:
    """Returns a path that the user gave, relative to a folder, as an absolute one."""
    if not isinstance(path, str | Path):
        raise SpecError(f"{where}: a path is needed, not {path!r}")
    if re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", str(path)):
        raise SpecError(f"{where}: {str(path)!r} holds control characters, or is not UTF-8; rename the file")
    try:
        return Path(os.path.abspath(folder / Path(path).expanduser()))
    except RuntimeError:  # ~nobody/
        raise SpecError(f"{where}: {path}: there is no such user's home folder; write the whole path") from None


# A larger file is not written by hand, and must be a mistake.
LARGEST_BYTES = 1 << 20


def read_text(path: Path, where: str) -> str:
    """Returns the text of a file that the user named.

    Args:
        where: The option or file that names it, for the error.

    Raises:
        SpecError: The file is missing, a folder, too large, or not a text in UTF-8.
    """
    try:
        str(path).encode()  # study.yaml holds the name in UTF-8
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            raise SpecError(f"{where}: {path} is a folder, not a file")
        if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for, a device may never end
            raise SpecError(
                f"{where}: {path} is no regular file but a pipe, a socket or a device; write to a file and name that"
            )
        if found.st_size > LARGEST_BYTES:
            size = format_bytes(found.st_size)
            raise SpecError(f"{where}: {path} has {size}, more than a person writes (1 MiB); is it the right file?")
        return path.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    except FileNotFoundError:
        names = []
        with contextlib.suppress(OSError):  # the folder is missing, or may not be listed
            names = os.listdir(path.parent)
        raise SpecError(f"{where}: there is no file {path}.{nearest(path.name, names)}") from None
    except UnicodeDecodeError:
        raise SpecError(f"{where}: {path} is not a text file in UTF-8; save it as UTF-8") from None
    except UnicodeEncodeError:
        raise SpecError(
            f"{where}: the name {str(path)!r} is not UTF-8, as a study.yaml that names it has to be; rename it"
        ) from None
    except ValueError:
        raise SpecError(f"{where}: {str(path)!r} cannot be the name of a file") from None
    except OSError as error:
        raise SpecError(f"{where}: {path} cannot be read: {error.strerror}") from None
