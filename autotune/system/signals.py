"""SIGINT, SIGTERM and SIGHUP: stop a study cleanly, and delay them while a trial is recorded."""

import contextlib
import os
import select
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn

# Number of signals that interrupt even a delaying block, which may wait long for a database.
MOST_IGNORED = 3
# What ends a study as Ctrl-C does: a scheduler's word, and the end of the terminal or of the connection to it.
ENDING = (signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM, SIGHUP and a broken pipe (SIGPIPE); a command ends as after Ctrl-C, but with another exit status.

    Args:
        number: Of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.status = 128 + number


def status_of(stop: KeyboardInterrupt) -> int:
    """Returns the exit status of a command that was stopped."""
    return stop.status if isinstance(stop, Terminated) else 128 + signal.SIGINT


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP end a study as Ctrl-C does: ranks stopped, results kept, the best so far printed."""

    def interrupt(number: int, _: object) -> NoReturn:
        raise Terminated(number)

    with _handled(ENDING, interrupt):
        yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Delays Ctrl-C, SIGTERM and SIGHUP until the block is done, so that a trial is recorded whole.

    Raises:
        KeyboardInterrupt: At the end of the block if a signal came; at once at the third.
    """
    came: list[int] = []

    def stop() -> KeyboardInterrupt:
        ended = next((number for number in came if number in ENDING), None)
        return KeyboardInterrupt() if ended is None else Terminated(ended)

    def put_off(number: int, _: object) -> None:
        came.append(number)
        if len(came) >= MOST_IGNORED:
            raise stop()

    with _handled((signal.SIGINT, *ENDING), put_off):
        yield
    if came:
        raise stop()


@contextlib.contextmanager
def _handled(numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handles signals in a block; not SIGHUP where it is ignored, as under nohup, and none outside of the main thread."""

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_lost_terminal()
        handler(number, frame)

    before = {}
    if threading.current_thread() is threading.main_thread():  # only it may set handlers, and only it is interrupted
        some = [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, handle) for number in some}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _leave_lost_terminal() -> None:
    """Leads what goes to a terminal that is gone to nowhere: each line would end in an error, and the answer would not be written."""
    for stream in (0, 1, 2):
        with contextlib.suppress(OSError):  # a closed stream
            if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
                _lead_nowhere(stream)


def broken_pipes() -> list[int]:
    """Returns which of standard output and error nobody reads any more, as after `head`."""
    poll = select.poll()
    for stream in (1, 2):
        poll.register(stream, 0)  # errors are told without being asked for
    return [stream for stream, event in poll.poll(0) if event & select.POLLERR]


def leave_broken_pipes() -> None:
    """Leads what nobody reads any more to nowhere, so that the rest can be said without an error."""
    for stream in broken_pipes():
        _lead_nowhere(stream)


def leave_unwritten() -> None:
    """Leads standard output to nowhere if its rest cannot be written, as on a full disk, for which Python has another status."""
    try:
        sys.stdout.flush()
    except OSError:
        _lead_nowhere(1)


def _lead_nowhere(stream: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, stream)
    os.close(nowhere)
