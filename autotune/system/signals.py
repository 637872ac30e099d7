"""SIGINT and SIGTERM: stop a study cleanly, and delay both while a trial is recorded."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import NoReturn

# Number of signals that interrupt even a delaying block, which may wait long for a database.
MOST_IGNORED = 3


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM; a command ends as after Ctrl-C, but with another exit status."""

    status = 128 + signal.SIGTERM


def status_of(stop: KeyboardInterrupt) -> int:
    """Returns the exit status of a command that was stopped."""
    return stop.status if isinstance(stop, Terminated) else 128 + signal.SIGINT


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Makes SIGTERM end a study as Ctrl-C does: ranks stopped, results kept, the best so far printed."""

    def interrupt(*_: object) -> NoReturn:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; a library may be called from any
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Delays Ctrl-C and SIGTERM until the block is done, so that a trial is recorded whole.

    Raises:
        KeyboardInterrupt: At the end of the block if a signal came; at once at the third.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is interrupted
        return
    came: list[int] = []

    def stop() -> KeyboardInterrupt:
        return Terminated() if signal.SIGTERM in came else KeyboardInterrupt()

    def put_off(number: int, _: object) -> None:
        came.append(number)
        if len(came) >= MOST_IGNORED:
            raise stop()

    before = {number: signal.signal(number, put_off) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise stop()
