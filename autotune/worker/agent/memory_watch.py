"""The watch over a rank's resident memory, from its supervisor: a rank that trains is not woken for it."""

import contextlib
import resource
import socket
import time
from pathlib import Path

from autotune.worker.measure.watched import FD_VARIABLE, LOOK

# Looks come as late as the memory left permits: a rank gets new pages at a few GB/s, a whole machine at some tens.
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.01, 1.0
FASTEST_GROWTH_BYTES_PER_S = 16e9
# A rank over its limit is asked to look itself, as it can hand freed memory back first: not more often than this, since
# its pages would have to be faulted in again.
ASK_INTERVAL_S = 0.2


def interval_s(left_bytes: int) -> float:
    """Returns the wait before the next look: too short for a rank to use up the memory it has left."""
    return min(MAX_INTERVAL_S, max(MIN_INTERVAL_S, left_bytes / FASTEST_GROWTH_BYTES_PER_S))


class MemoryWatch:
    """Compares the resident memory of one rank with the limit that it names at its start."""

    def __init__(self) -> None:
        self._own, self._ranks = socket.socketpair()
        self._own.setblocking(False)
        self._most = 0
        self.due = 0.0

    def variables(self) -> dict[str, str]:
        """Returns the variable that tells a rank its end; the end survives the start of a new Python."""
        self._ranks.set_inheritable(True)
        return {FD_VARIABLE: str(self._ranks.fileno())}

    def become_rank(self) -> None:
        """In the rank: closes the supervisor's end."""
        self._own.close()

    def release(self) -> None:
        """In the supervisor: closes the rank's end."""
        self._ranks.close()

    def drop(self) -> None:
        """Closes both ends."""
        self._own.close()
        self._ranks.close()

    def look(self, pid: int) -> None:
        """Looks at a rank if it is time to, and has it look itself if it seems to be over its limit."""
        now = time.monotonic()
        if now < self.due:
            return
        self.due = now + MAX_INTERVAL_S / 10
        with contextlib.suppress(OSError, ValueError, IndexError):
            if not self._most:
                self._most = int(self._own.recv(64))
            left = self._most - int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
            self.due = now + (interval_s(left) if left >= 0 else ASK_INTERVAL_S)
            if left < 0:
                self._own.send(LOOK)
