"""The live view of a running study: a line for each trial, a bar and the running trial; all on standard error."""

import textwrap
import time
from collections import Counter
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from autotune.errors import wrapped
from autotune.report.console import ProgressConsole
from autotune.report.run_view import RunView, reason_words, trials_words
from autotune.study.events import Event, Kind, Progress
from autotune.system import redaction
from autotune.system.units import format_quantity
from autotune.trial.result import Outcome

STYLES = {
    Outcome.COMPLETE: "", Outcome.OOM: "yellow", Outcome.LOST: "dim", Outcome.STOPPED_EARLY: "dim",
    Outcome.PREDICTED_OOM: "dim",
}  # fmt: skip
# What a line says of a complete trial: metric, unit, head and width of the column.
COLUMNS = (
    ("step_time_s", "s", "step time", 9), ("samples_per_s", "samples/s", "samples/s", 9), ("peak_memory_bytes", "B", "memory", 8),
)  # fmt: skip
TRIAL = 5  # columns of a number
FIGURES = sum(width + 2 for *_, width in COLUMNS)
INDENT = TRIAL + FIGURES
LEAST_WORDS = 30  # columns; with less room a configuration stands on the next line
LEAST_ROOM = 10  # columns of a text, also in a terminal that has fewer, which breaks its lines itself
BAR = 28
ECHOED = 3  # columns that the last live line leaves free: a terminal shows a Ctrl-C there as ^C, which would begin another line


class ProgressView(RunView):
    """Prints a line for each trial and, in a terminal that can move its cursor, keeps lines about the running trial and the time left.

    Trials that are measured again share one line.

    Args:
        console: The console; standard error by default, since standard output is for the answer.
        after_s: Delay in seconds before the live lines appear, so that a quick command shows none.
    """

    def __init__(self, console: Console | None = None, *, after_s: float = 0.0) -> None:
        super().__init__()
        self.console = console or ProgressConsole()
        self._shown_from = self._since + after_s
        self._again: Counter[int] = Counter()
        self._headed = False
        # It redraws itself, so that seconds pass also where nothing emits ticks.
        drawn = Live(get_renderable=self._drawn, console=self.console, refresh_per_second=4, transient=True)
        self._live = drawn if self.console.is_interactive else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._show_again()
        if self._live is not None:
            self._live.stop()

    def opening(self, target: str) -> None:
        """Shows at once, in a terminal, that a target is being read; called before slow imports."""
        self._start_clock(f"reading {redaction.redact(target)}", Event(kind=Kind.PHASE))
        self._refresh()

    def _refresh(self) -> None:
        if self._live is not None and self._live.is_started:
            self._live.refresh()

    def _show_phase(self) -> None:
        if self._live is None:
            self._show_note(self._doing)

    def _drawn(self) -> Group:
        if not self._doing or time.monotonic() < self._shown_from:
            return Group()
        doing = _row(f"{time.monotonic() - self._since:>4.0f} s  {self._doing}", "bold")
        doing.truncate(max(1, self.console.width - ECHOED), overflow="ellipsis")
        if self._latest is None:
            return Group(doing)
        progress, (gone_s, left_s) = self._latest[0], self._times_s()
        bar = Table.grid(padding=(0, 2))
        bar.add_row("", ProgressBar(1.0, gone_s / max(gone_s + left_s, 1.0), width=BAR), trials_words(progress, left_s))
        return Group(bar, _row(progress.best_words(), "dim"), doing)

    def _show_end(self, progress: Progress) -> None:
        if progress.role == "repeat" and progress.outcome is Outcome.COMPLETE:
            self._again[progress.number] += 1
            return
        self._show_again()
        self._print_trial(progress)
        if self._live is None and progress.role != "repeat" and progress.n_told % 5 == 0:
            self._show_note(f"{trials_words(progress, progress.left_s)}; {progress.best_words()}")

    def _print_trial(self, progress: Progress) -> None:
        room = self.console.width - INDENT - 2
        below = self._live is not None and room < LEAST_WORDS  # whether a configuration stands on other lines
        if not self._headed:
            self._headed = True
            heads = "".join(f"  {head:>{width}}" for _, _, head, width in COLUMNS) + "  configuration" * (not below)
            self._print(Text(f"{'trial':>{TRIAL}}{heads}", style="bold"))
        words, end = progress.candidate.describe(), progress.outcome.words
        if progress.outcome is Outcome.COMPLETE:
            figures = "".join(f"  {_figure(progress.metrics, *column)}" for column in COLUMNS)
            words += " (baseline)" if progress.role == "baseline" else ""
        else:
            figures = f"  {end:>{FIGURES - 2}}"
        words += f": {reason}" if (reason := reason_words(progress)) else ""
        line = Text(f"{progress.number:>{TRIAL}}").append(figures, style=STYLES.get(progress.outcome, "red"))
        if self._live is None:
            self._print(line.append(f"  {words}"))
        elif not below:
            first, *rest = textwrap.wrap(words, room) or [""]
            self._print(line.append(f"  {first}"), *(Text(" " * (INDENT + 2) + more) for more in rest))
        else:
            broken = textwrap.wrap(words, max(LEAST_ROOM, self.console.width - TRIAL - 2))
            self._print(line, *(Text(" " * (TRIAL + 2) + more) for more in broken))

    def _show_again(self) -> None:
        """Prints the line of the trials that were measured again."""
        if self._again:
            each = ", ".join(f"trial {number} {n} x" for number, n in sorted(self._again.items()))
            self._again.clear()
            self._show_note(f"measured again: {each}")

    def _show_note(self, text: str) -> None:
        room = max(LEAST_ROOM, self.console.width)
        lines = [f"- {text}"] if self._live is None else wrapped(text, room, "- ", "  ") or ["- "]
        self._print(*map(Text, lines))

    def _print(self, *lines: Text) -> None:
        for line in lines:
            self.console.print(line, soft_wrap=True)  # it was wrapped, but for one that is piped and for commands


def _row(text: str, style: str) -> Text:
    """A live line; what does not fit is cut, so that the lines below it stay where they are."""
    return Text(f"  {text}", style=style, no_wrap=True, overflow="ellipsis")


def _figure(metrics: dict[str, float], metric: str, unit: str, _head: str, width: int) -> str:
    text = format_quantity(metrics[metric], unit).removesuffix(" samples/s") if metric in metrics else ""
    return f"{text:>{width}}"
