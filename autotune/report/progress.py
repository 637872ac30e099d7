"""The live view of a running study: a line for each trial, and one for the running trial; all on standard error."""

from __future__ import annotations

import io
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from autotune.study.events import Event, EventSink, Kind, Progress
from autotune.system import redaction
from autotune.system.units import format_duration, format_quantity
from autotune.trial.result import Outcome

STYLES = {
    Outcome.COMPLETE: "green", Outcome.OOM: "yellow", Outcome.LOST: "dim", Outcome.STOPPED_EARLY: "dim",
    Outcome.PREDICTED_OOM: "dim",
}  # fmt: skip


class ProgressView(EventSink):
    """Prints a line for each trial and, in a terminal, keeps one line about the running trial.

    Args:
        console: The console; standard error by default, since standard output is for the answer.
        after_s: Delay in seconds before the live line appears, so that a quick command shows none.
    """

    def __init__(self, console: Console | None = None, *, after_s: float = 0.0) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self._doing = ""
        self._since = time.monotonic()
        self._shown_from = self._since + after_s
        self._under_way: dict[int, str] = {}
        self._standing = ""
        self._waited = False
        # It redraws itself, so that seconds pass also where nothing emits ticks.
        drawn = Live(get_renderable=self._line, console=self.console, refresh_per_second=4, transient=True)
        self._live = drawn if self.console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def emit(self, event: Event) -> None:
        """Shows an event."""
        match event.kind:
            case Kind.NOTE:
                self._print(Text(f"- {redaction.redact(event.text)}"))
            case Kind.QUEUE_WAIT:
                self._print(Text(f"- waiting: {redaction.redact(event.text)}"))
            case Kind.TURN_WAIT if not self._waited:
                self._waited = True
                self._print(Text("- something else is measured on this machine; taking turns, trial by trial"))
            case Kind.PHASE:
                self._start_clock(event.text, event)
                if self._live is None:
                    self._print(Text(f"- {event.text}"))
            case Kind.TRIAL_STARTED if event.trial is not None and event.candidate is not None:
                again = " again" if event.role == "repeat" else ""
                self._under_way[event.trial] = f"trial {event.trial}{again}: {event.candidate.describe()}"
                self._start_clock("; ".join(self._under_way.values()), event)
            case Kind.TRIAL_ENDED if event.progress is not None:
                self._show_end(event.progress)
        if self._live is not None and self._live.is_started:
            self._live.refresh()

    def _start_clock(self, text: str, event: Event) -> None:
        self._doing = text
        self._since = time.monotonic() - max(0.0, time.time() - event.time_s)

    def _line(self) -> Text:
        if not self._doing or time.monotonic() < self._shown_from:
            return Text()
        line = Text(f"  {self._doing}  {time.monotonic() - self._since:.0f} s", style="bold")
        return Text("\n").join([line, Text(f"  {self._standing}", style="dim")]) if self._standing else line

    def _show_end(self, progress: Progress) -> None:
        self._under_way.pop(progress.number, None)
        self._doing = "; ".join(self._under_way.values()) or self._doing
        label = {"repeat": "again", "baseline": "base"}.get(progress.role, "")
        line = Text(f"{progress.number:>4} {label:<6}")
        line.append(f"{progress.outcome!s:<12}", style=STYLES.get(progress.outcome, "red"))
        line.append(f" {progress.candidate.describe()}")
        if progress.outcome is Outcome.COMPLETE:
            line.append(f"  {_figures(progress.metrics)}")
        elif progress.reason:
            line.append(f"  {progress.reason[:160]}", style="dim")
        self._print(line)
        self._standing = _standing(progress)
        if self._live is None and progress.role != "repeat" and progress.n_told % 5 == 0:
            self._print(Text(f"- {self._standing}"))

    def _print(self, line: Text) -> None:
        self.console.print(line, soft_wrap=self._live is None)  # a piped line stays one line


def viewer(show: bool, *, after_s: float = 0.0) -> ProgressView:
    """Returns a view for the terminal, or one that shows nothing."""
    hidden = Console(file=io.StringIO(), quiet=True, force_terminal=False)
    return ProgressView(None if show else hidden, after_s=after_s)


def _figures(metrics: dict[str, float]) -> str:
    units = {"step_time_s": "s", "samples_per_s": "samples/s", "peak_memory_bytes": "B"}
    return ", ".join(format_quantity(metrics[name], unit) for name, unit in units.items() if name in metrics)


def _standing(progress: Progress) -> str:
    text = f"{progress.n_told} of {progress.n_trials} trials, about {format_duration(progress.left_s)} left"
    if progress.best is not None:
        gain = (
            f", {progress.best_gain:.2f}x the baseline by the goal"
            if progress.best_gain and progress.best.trial
            else ""
        )
        text += f"; best so far: trial {progress.best.trial}, {progress.best.candidate.describe()}{gain}"
    return text
