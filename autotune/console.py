"""What a person sees while a study runs: a live line in a terminal, plain lines elsewhere. All of it on standard error."""

from __future__ import annotations

import io
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from autotune import masking
from autotune.candidate import Candidate
from autotune.study import Progress
from autotune.trial import Outcome

MARKS = {
    Outcome.COMPLETE: "green", Outcome.OOM: "yellow", Outcome.LOST: "dim", Outcome.STOPPED_EARLY: "dim", Outcome.PREDICTED_OOM: "dim",
}  # fmt: skip


class ProgressView:
    """Prints a line for each trial and, in a terminal, keeps one line about the trial under way.

    Args:
        console: Where to print; standard error by default, since standard output is for the answer.
        after_s: The line appears only once it has been this long, so that what is quick says nothing.
    """

    def __init__(self, console: Console | None = None, *, after_s: float = 0.0) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self._doing = ""
        self._since = time.monotonic()
        self._shown_from = self._since + after_s
        self._under_way: dict[int, str] = {}
        self._standing = ""
        self.is_waiting = False
        # It draws itself again and again, so that seconds are seen to pass also where nobody calls `tick`.
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

    def say(self, text: str) -> None:
        """Something worth a line."""
        self._print(Text(f"- {masking.masked(text)}"))

    def doing(self, text: str, *, ago_s: float = 0.0) -> None:
        """What goes on now, or since so many seconds, shown until something else does."""
        self._doing, self._since = text, time.monotonic() - ago_s
        if self._live is None:
            self._print(Text(f"- {text}"))
        self.tick()

    def began(self, number: int, candidate: Candidate, role: str, *, ago_s: float = 0.0) -> None:
        """A trial starts, or started so many seconds ago."""
        self._under_way[number] = f"trial {number}{' again' if role == 'repeat' else ''}: {candidate.describe()}"
        self._doing, self._since = "; ".join(self._under_way.values()), time.monotonic() - ago_s
        self.tick()

    def waiting(self) -> None:
        """Another study, or another coordinator of this one, measures on this machine; said once."""
        if not self.is_waiting:
            self.is_waiting = True
            self.say("something else is measured on this machine; taking turns, trial by trial")

    def waits(self, why: str) -> None:
        """The engine has no machine for a trial yet."""
        self.say(f"waiting: {why}")

    def tick(self) -> None:
        """Redraws the line about the trial under way."""
        if self._live is not None and self._live.is_started:
            self._live.refresh()

    def _line(self) -> Text:
        if not self._doing or time.monotonic() < self._shown_from:
            return Text()
        line = Text(f"  {self._doing}  {time.monotonic() - self._since:.0f} s", style="bold")
        return Text("\n").join([line, Text(f"  {self._standing}", style="dim")]) if self._standing else line

    def ended(self, progress: Progress) -> None:
        """A trial was told: its line stays."""
        self._under_way.pop(progress.number, None)
        self._doing = "; ".join(self._under_way.values()) or self._doing
        label = {"repeat": "again", "baseline": "base"}.get(progress.role, "")
        line = Text(f"{progress.number:>4} {label:<6}")
        line.append(f"{progress.outcome!s:<12}", style=MARKS.get(progress.outcome, "red"))
        line.append(f" {progress.candidate.describe()}")
        if progress.outcome is Outcome.COMPLETE:
            line.append(f"  {_figures(progress.metrics)}")
        elif progress.reason:
            line.append(f"  {progress.reason[:160]}", style="dim")
        self._print(line)
        self._standing = _standing(progress)
        if self._live is None and progress.role != "repeat" and progress.n_told % 5 == 0:
            self._print(Text(f"- {self._standing}"))
        self.tick()

    def _print(self, line: Text) -> None:
        self.console.print(line, soft_wrap=self._live is None)  # in a pipe a line stays one line


def viewer(show: bool, *, after_s: float = 0.0) -> ProgressView:
    """A view for the terminal, or one that shows nothing."""
    return (
        ProgressView(after_s=after_s)
        if show
        else ProgressView(Console(file=io.StringIO(), quiet=True, force_terminal=False))
    )


def _figures(metrics: dict[str, float]) -> str:
    parts = []
    if "step_time_s" in metrics:
        parts.append(f"{metrics['step_time_s'] * 1e3:.4g} ms/step")
    if "samples_per_s" in metrics:
        parts.append(f"{metrics['samples_per_s']:.4g} samples/s")
    if "peak_memory_bytes" in metrics:
        parts.append(f"{metrics['peak_memory_bytes'] / 2**20:.0f} MiB")
    return ", ".join(parts)


def _standing(progress: Progress) -> str:
    text = f"{progress.n_told} of {progress.n_trials} trials, about {duration(progress.left_s)} left"
    if progress.best is not None:
        gain = f", {progress.best_speedup:.2f}x the baseline's throughput" if progress.best_speedup else ""
        text += f"; best so far: trial {progress.best.trial}, {progress.best.candidate.describe()}{gain}"
    return text


def duration(seconds: float) -> str:
    """Seconds as a person says them: 45 s, 3 min, 2.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
