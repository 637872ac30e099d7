"""What a view of a running study keeps of its events, wherever it is drawn."""

import time

from autotune.errors import shortened
from autotune.study.events import Event, EventSink, Kind, Progress
from autotune.system import redaction

LONGEST_REASON = 160


class RunView(EventSink):
    """Keeps what a run does now, since when, and its state after the last trial; the views that draw it say how."""

    def __init__(self) -> None:
        self._doing = ""
        self._since = time.monotonic()
        self._began_s: float | None = None
        self._under_way: dict[int, str] = {}
        self._latest: tuple[Progress, float] | None = None

    def emit(self, event: Event) -> None:
        """Shows an event."""
        self._began_s = event.time_s if self._began_s is None else self._began_s
        text = redaction.redact(event.text)
        match event.kind:
            case Kind.NOTE:
                self._show_note(text)
            case Kind.WAIT:
                self._show_note(f"waiting: {text}")
            case Kind.PHASE:
                self._start_clock(text, event)
                self._show_phase()
            case Kind.TRIAL_STARTED:
                event.note_under_way(self._under_way)
                self._start_clock("; ".join(self._under_way.values()), event)
            case Kind.TRIAL_ENDED if event.progress is not None:
                self._under_way.pop(event.progress.number, None)
                self._doing = "; ".join(self._under_way.values()) or self._doing
                self._latest = event.progress, event.time_s
                self._show_end(event.progress)
        self._refresh()

    def _start_clock(self, text: str, event: Event) -> None:
        self._doing = text
        self._since = time.monotonic() - max(0.0, time.time() - event.time_s)  # a journal tells of what is over

    def _times_s(self) -> tuple[float, float]:
        """How long the run has taken, and how long it will take by what was expected after its last trial."""
        progress, ended_s = self._latest or (None, 0.0)
        left_s = progress.left_s - (time.time() - ended_s) if progress is not None else 0.0
        return max(0.0, time.time() - (self._began_s or time.time())), max(0.0, left_s)

    def _show_note(self, text: str) -> None:
        """Shows a message."""

    def _show_phase(self) -> None:
        """Shows what the run does from now on."""

    def _show_end(self, progress: Progress) -> None:
        """Shows the end of a trial."""

    def _refresh(self) -> None:
        """Draws anew what changes."""


def reason_words(progress: Progress) -> str:
    """Why a trial ended as it did, on one line and cut; empty without a reason."""
    return shortened(" ".join(redaction.redact(progress.reason).split()), LONGEST_REASON)


def trials_words(progress: Progress, left_s: float) -> str:
    """How far a study is."""
    left = progress.left_words(left_s) if left_s >= 1 else "taking longer than estimated"
    return f"{progress.n_told} of at most {progress.n_trials} trials, {left}"
