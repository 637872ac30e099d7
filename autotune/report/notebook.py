"""A study in a notebook: its answer as HTML, and one display that shows how far a run is."""

import sys
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Self

from autotune.report import tables
from autotune.report.data import StudyReport, titles, words
from autotune.report.gains import pick_words
from autotune.report.next_steps import next_steps
from autotune.report.page.render import notebook
from autotune.report.progress import COLUMNS, ProgressView
from autotune.report.readme import extent, machine, subject
from autotune.report.run_view import RunView, reason_words, trials_words
from autotune.study.events import SILENT, EventSink, Progress
from autotune.system.units import format_duration, format_quantity
from autotune.trial.result import Outcome

MOST_ENDS, MOST_NOTES = 6, 3
LEAST_S = 0.5  # between two updates of the display


def answer_html(report: StudyReport) -> str:
    """The answer of a study: the recommendation with its price, the front as a table, what to know."""
    pick = report.picks.get("recommended")
    heads, rows = tables.listed(report)
    found = {
        "lead": f"{report.name}: {lead(report)}",
        "headline": headline(report),
        "heads": heads,
        "rows": rows,
        "lists": [
            ("What to do next", next_steps(report)),
            ("Why", (pick or {}).get("reasons") or ()),
            ("Besides the JSON it takes", (pick or {}).get("script_side_changes") or ()),
            ("What to know", report.caveats()),
        ],
    }
    return notebook("answer", found)


def lead(report: StudyReport) -> str:
    """What was tuned where, in how many trials."""
    return f"{subject(report)} on {machine(report)}, {extent(report)}"


def headline(report: StudyReport) -> str:
    """The recommendation with its price in one sentence, or why there is none."""
    pick = report.picks.get("recommended")
    if pick is None:
        return f"Nothing to recommend: {report.why_nothing}."
    names = report.picked_for(pick)
    said, head = pick_words(report, names, pick), titles(names)
    later = f" Replaced by the answer of {later}." if (later := report.study.get("replaced_by")) else ""
    return f"{head[0].upper()}{head[1:]}: trial {pick['trial']}, {words(pick['candidate'])}; {said}.{later}"


class NotebookView(RunView):
    """One display below the cell, which is redrawn while a study runs, at most twice a second."""

    def __init__(self) -> None:
        from IPython.display import display

        super().__init__()
        self._display: Any = display
        self._handle: Any = None
        self._drawn = 0.0
        self._doing = "starting"
        self._ends: deque[dict[str, Any]] = deque(maxlen=MOST_ENDS)
        self._notes: deque[str] = deque(maxlen=MOST_NOTES)

    def __enter__(self) -> Self:
        self._handle = self._display(self, display_id=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._doing = ""
        self._draw()

    def _show_note(self, text: str) -> None:
        self._notes.append(text)

    def _show_end(self, progress: Progress) -> None:
        measured = [
            format_quantity(progress.metrics[name], unit)
            for name, unit, *_ in COLUMNS
            if name in progress.metrics and progress.outcome is Outcome.COMPLETE
        ]
        reason = reason_words(progress)
        self._ends.append({
            "trial": f"{progress.number}{' again' if progress.role == 'repeat' else ''}",
            "configuration": progress.candidate.describe(), "outcome": progress.outcome.words,
            "measured": ", ".join([*measured, *([reason] if reason else [])]),
        })  # fmt: skip

    def _refresh(self) -> None:
        if time.monotonic() - self._drawn >= LEAST_S:
            self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if self._handle is not None:
            self._handle.update(self)

    def _standing(self) -> str:
        took_s, left_s = self._times_s()
        if self._latest is None:
            return format_duration(took_s)
        now = self._latest[0]
        took, best = format_duration(took_s), f"; {now.best_words()}" if now.best else ""
        far = (
            f"{trials_words(now, left_s)}; {took} so far"
            if self._doing
            else f"{now.n_told} of {now.n_trials} trials in {took}"
        )
        return far + best

    def _repr_html_(self) -> str:
        doing = f"{self._doing} ({time.monotonic() - self._since:.0f} s)" if self._doing else ""
        found = {
            "n_told": self._latest[0].n_told if self._latest else 0,
            "n_trials": self._latest[0].n_trials if self._latest else 1,
            "standing": self._standing(),
            "doing": doing,
            "notes": list(self._notes),
            "ends": list(reversed(self._ends)),
        }
        return notebook("progress", found)

    def __repr__(self) -> str:
        return self._standing()


def in_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def viewer(show: bool) -> AbstractContextManager[EventSink]:
    """Returns a view of a run: in a notebook below its cell, else on standard error; or one that shows nothing."""
    return nullcontext(SILENT) if not show else NotebookView() if in_notebook() else ProgressView()
