"""Consoles whose reader may go away, as `head` does, or a `tee` that is stopped; rich's own would end the process with status 1."""

import signal
import sys

from rich.console import Console

from autotune.system.signals import Terminated, leave_broken_pipes


class AnswerConsole(Console):
    """The console of an answer: what nobody reads is not printed, and the command ends with its status."""

    def on_broken_pipe(self) -> None:
        """Called where the reader is gone."""
        self.quiet = True
        leave_broken_pipes()


class ProgressConsole(Console):
    """The console of a run, on standard error: a run of which nobody reads ends as by SIGTERM, with what it found written."""

    def __init__(self) -> None:
        # A log is none to be redrawn, though FORCE_COLOR has rich take it for a terminal.
        is_terminal = getattr(sys.stderr, "isatty", bool)()
        super().__init__(stderr=True, highlight=False, force_interactive=None if is_terminal else False)

    def on_broken_pipe(self) -> None:
        """Called where the reader is gone."""
        leave_broken_pipes()
        raise Terminated(signal.SIGPIPE)
