"""The report of a rank while it runs, and its event stream."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from autotune.system import redaction
from autotune.trial.folder import TrialDir, write_record
from autotune.trial.result import Outcome, RankReport


class Recorder:
    """Holds a rank's report, so that after any failure the report says how far the rank got.

    Attributes:
        report: The report; its outcome is a crash unless a better one is set.
        began_s: When the rank began, in seconds of the monotonic clock.
        check_memory: Fails the rank if its memory is over the limit.
    """

    def __init__(self, folder: TrialDir, rank: int) -> None:
        self.folder = folder
        self.report = RankReport(rank=rank)
        self.check_memory: Callable[[], object] = lambda: None
        self.began_s = self._entered = time.monotonic()
        self._lock = threading.Lock()

    def enter(self, phase: str) -> None:
        """Enters a phase, notes how long the last one took, and writes an event."""
        now = time.monotonic()
        if self.report.phase in ("import", "build", "initialize"):
            self.report.startup_s[self.report.phase] = now - self._entered
        self.report.phase, self._entered = phase, now
        self.event(phase=phase)

    def event(self, **what: Any) -> None:
        """Appends a line to the trial's event stream, small enough to be written atomically; errors are ignored."""
        line = json.dumps({"time": time.time(), "rank": self.report.rank, **what}) + "\n"
        with contextlib.suppress(OSError):
            events = self.folder.events_of(int(os.environ.get("GROUP_RANK", "0")))
            descriptor = os.open(events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)

    def fail(self, outcome: Outcome, reason: str) -> None:
        """Writes the report of a failure."""
        reason = redaction.redact(reason)  # an exception may quote a token
        self.report.outcome, self.report.reason, self.report.failed_at = outcome, reason, time.time()
        self.event(outcome=outcome, reason=reason)
        self.write()

    def write(self) -> None:
        """Writes the report."""
        with self._lock:
            write_record(self.folder.report(self.report.rank), self.report, sync=False)
