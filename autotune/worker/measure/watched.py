"""The rank's end of the watch over its memory; see `agent.memory_watch` for the supervisor's."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable

# Descriptor of the socket to the supervisor, and what the supervisor sends to have the rank look.
FD_VARIABLE, LOOK = "AUTOTUNE_MEMORY_FD", b"?"


def answer(most_bytes: int, look: Callable[[], object]) -> None:
    """Tells the supervisor the resident bytes that are allowed, and looks whenever it asks.

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
