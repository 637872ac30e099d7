"""Where a rank stands: it writes its stack into its log when its supervisor asks, before it kills it."""

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Iterable

from autotune.trial import stood
from autotune.worker.agent.rank import Rank

# No named signal: scripts on clusters handle SIGUSR1 and SIGUSR2 themselves.
ASK = signal.SIGRTMAX
# Time that ranks get to write; a busy machine runs their handlers late.
WRITE_S = 0.5


def answer() -> None:
    """In a rank: writes the stack of the main thread to standard error whenever it is asked."""
    faulthandler.register(ASK, file=2, all_threads=False)


def ask(ranks: Iterable[Rank]) -> None:
    """In the supervisor: makes ranks write into their logs where they stand."""
    for rank in ranks:
        rank.log.write(stood.HEAD.encode())
        with contextlib.suppress(ProcessLookupError):  # it ended just now
            os.kill(rank.pid, ASK)
    time.sleep(WRITE_S)
