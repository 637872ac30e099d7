"""The watch over a rank's resident memory: its supervisor looks, so that a rank that trains is not woken for it."""

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

# Descriptor of the socket to the supervisor, and what the supervisor sends to have the rank look.
FD_VARIABLE, LOOK = "AUTOTUNE_MEMORY_FD", b"?"
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


def answer(most_bytes: int, look: Callable[[], object]) -> None:
    """In the rank: tells the supervisor the resident bytes that are allowed, and looks whenever it asks.

    A thread waits for that, without ever waking; without a supervisor there is none.
    """
    descriptor = os.environ.pop(FD_VARIABLE, "")
    if not descriptor:
        return
    channel = socket.socket(fileno=int(descriptor))
    channel.set_inheritable(False)

    def wait() -> None:
        with contextlib.suppress(OSError):
            while channel.recv(64):
                look()

    channel.send(str(most_bytes).encode())
    threading.Thread(target=wait, name="autotune-memory", daemon=True).start()
