"""What a rank prints: its agent takes it from a pipe and keeps head and tail, so that no disk is filled however fast a rank writes."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

LIMIT_BYTES = 16 << 20
HEAD_BYTES = TAIL_BYTES = 1 << 20
CUT = b"\n[autotune: the log grew too large; lines were cut here]\n"
# As much as a rank may print between two looks without having to wait.
PIPE_BYTES = 1 << 20
CHUNK_BYTES, MOST_AT_ONCE = 256 << 10, 4 << 20
F_SETPIPE_SZ = 1031
# Somebody who printed so much since the last look is looked after again at once.
BUSY_BYTES = 64 << 10


class Log:
    """The log of one rank, at the agent's end of the pipe.

    Args:
        path: Where it is kept.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._read, self._write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read, False)
        with contextlib.suppress(OSError):  # the usual size will do
            fcntl.fcntl(self._write, F_SETPIPE_SZ, PIPE_BYTES)

    def become_output(self) -> None:
        """In the rank: makes the pipe its standard output and error."""
        for target in (1, 2):
            os.dup2(self._write, target)

    def release(self) -> None:
        """In the agent: the rank has its end."""
        os.close(self._write)
        self._write = -1

    def take(self) -> bool:
        """Keeps what was printed since the last look; whether so much that the rank may be waiting for the next."""
        n = 0
        while n < MOST_AT_ONCE:
            try:
                data = os.read(self._read, CHUNK_BYTES)
            except OSError:  # nothing for now
                break
            if not data:
                break
            n += len(data)
            with contextlib.suppress(OSError):  # a full disk costs the log, not the trial
                os.write(self._file, data)
                self._cut(LIMIT_BYTES)
        return n >= BUSY_BYTES

    def close(self) -> None:
        """Keeps what still stands in the pipe, where everybody who might print is dead, and of what is too long head and tail."""
        for _ in range(2 * PIPE_BYTES // BUSY_BYTES):
            if not self.take():
                break
        with contextlib.suppress(OSError):
            self._cut(HEAD_BYTES + 2 * TAIL_BYTES)
        self.drop()

    def drop(self) -> None:
        """Closes all descriptors."""
        for descriptor in (self._read, self._write, self._file):
            if descriptor >= 0:
                os.close(descriptor)
        self._read = self._write = self._file = -1

    def _cut(self, limit: int) -> None:
        """Takes the middle out of a file that is longer."""
        size = os.fstat(self._file).st_size
        if size > limit:
            tail = os.pread(self._file, TAIL_BYTES, size - TAIL_BYTES)
            os.ftruncate(self._file, HEAD_BYTES)
            os.write(self._file, CUT + tail)
