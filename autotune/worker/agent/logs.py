"""The log of a rank: output goes through a pipe into a file of bounded size, which keeps its head and tail."""

import contextlib
import fcntl
import os
from pathlib import Path

LIMIT_BYTES = 16 << 20
HEAD_BYTES = TAIL_BYTES = 1 << 20
CUT = b"\n[autotune: the log grew too large; lines were cut here]\n"
# Output that a rank can print between two reads without waiting.
PIPE_BYTES = 1 << 20
CHUNK_BYTES, MAX_TAKEN_BYTES = 256 << 10, 4 << 20
F_SETPIPE_SZ = 1031
# After this much output since the last read, the next read follows at once.
BUSY_BYTES = 64 << 10


class Log:
    """The log of one rank, at the supervisor's end of the pipe."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._read, self._write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read, False)
        with contextlib.suppress(OSError):  # the usual size will do
            fcntl.fcntl(self._write, F_SETPIPE_SZ, PIPE_BYTES)

    def become_output(self) -> None:
        """In the rank: sends standard output and error into the pipe."""
        for target in (1, 2):
            os.dup2(self._write, target)

    def take(self) -> bool:
        """Writes new output to the file; returns whether the rank may be waiting for the next read."""
        n = 0
        while n < MAX_TAKEN_BYTES:
            try:
                data = os.read(self._read, CHUNK_BYTES)
            except OSError:  # nothing for now
                break
            n += len(data)
            with contextlib.suppress(OSError):  # a full disk costs the log, not the trial
                os.write(self._file, data)
                self._cut(LIMIT_BYTES)
        return n >= BUSY_BYTES

    def write(self, line: bytes) -> None:
        """Writes a line of the supervisor's own behind all that the rank has printed so far."""
        self.take()
        with contextlib.suppress(OSError):
            os.write(self._file, line)

    def close(self) -> None:
        """Writes the rest of the pipe, cuts the file to its final size, and closes it; the rank must be dead."""
        for _ in range(2 * PIPE_BYTES // BUSY_BYTES):
            if not self.take():
                break
        with contextlib.suppress(OSError):
            self._cut(HEAD_BYTES + 2 * TAIL_BYTES)
        self.drop()

    def drop(self) -> None:
        """Closes all descriptors."""
        for descriptor in (self._read, self._write, self._file):
            os.close(descriptor)

    def _cut(self, limit: int) -> None:
        """Removes the middle of the file if it is longer than the limit."""
        size = os.fstat(self._file).st_size
        if size > limit:
            tail = os.pread(self._file, TAIL_BYTES, size - TAIL_BYTES)
            os.ftruncate(self._file, HEAD_BYTES)
            os.write(self._file, CUT + tail)
