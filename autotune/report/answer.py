"""The answer for a terminal; it reads the same in a pipe, and no number is ever cut."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from autotune.report.data import Data, StudyReport, measured, metric_scale, speedup, title, words
from autotune.report.readme import machine, speedup_words, subject
from autotune.scoring.metrics import METRICS

# Narrower than this a configuration stands on a line of its own.
LEAST_WORDS = 24
GAP = "  "


@dataclass(frozen=True)
class _Answer:
    report: StudyReport
    written: Sequence[str]

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        yield from _lines(self.report, self.written, options.max_width)


def render_answer(report: StudyReport, written: Sequence[str] = ()) -> _Answer:
    """What a study found: the front as a table, the picks, the speed-up over the baseline.

    Args:
        report: The study.
        written: Paths of the files that were written.

    Returns:
        Something that rich prints.
    """
    return _Answer(report, written)


def _lines(report: StudyReport, written: Sequence[str], width: int) -> Iterator[Text]:
    yield from _wrapped(f"{report.name}: {subject(report)}, {machine(report)}", width, "  ", "bold", first="")
    yield Text()
    yield from _table(report, width)
    yield Text()
    if not report.picks:
        yield Text(f"Nothing to recommend: {report.why_nothing}.")
    for names, pick in report.picks_by_trial():
        yield from _pick(report, names, pick, width)
    notes = report.caveats()
    if notes:
        yield Text()
    for note in notes:
        yield from _wrapped(f"note: {note}", width, "      ", "dim", first="")
    if written:
        yield Text()
        yield Text("Written:")
        yield from (Text(f"  {min(path, os.path.relpath(path), key=len)}", overflow="fold") for path in written)


def _table(report: StudyReport, width: int) -> Iterator[Text]:
    points = report.table()
    if not points:
        return
    columns = _columns(report, points)
    taken = sum(max(map(len, column)) + len(GAP) for column in columns)
    marks = report.marks()
    room = width - taken
    yield from _header(columns, room >= LEAST_WORDS, width)
    for i, point in enumerate(points):
        numbers = GAP.join(column[-len(points) + i].rjust(max(map(len, column))) for column in columns)
        found = marks.get(point["trial"], [])
        style = "bold green" if "recommended" in found else "dim" if found == ["baseline"] else ""
        text = words(point["candidate"]) + (f"  <-\xa0{', '.join(found)}" if found else "")
        if room >= LEAST_WORDS:
            first, *rest = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
            yield Text(f"{numbers}{GAP}{first}".replace("\xa0", " "), style=style)
            yield from (Text(f"{' ' * taken}{line}".replace("\xa0", " "), style=style) for line in rest)
        else:
            yield Text(numbers, style=style)
            yield from _wrapped(text, width, "       ", style, first="       ")


def _columns(report: StudyReport, points: Sequence[Data]) -> list[list[str]]:
    """The columns of numbers: header lines first, as many in each, then a cell for each point."""
    names = report.metric_names(all_metrics=False)
    columns, headers = [[str(point["trial"]) for point in points]], ["trial"]
    for name in names:
        scale = metric_scale(name, (measured(point).get(name, 0.0) for point in points))
        columns.append([scale.number(measured(point)[name]) if name in measured(point) else "-" for point in points])
        headers.append(f"{METRICS[name].label}\n{scale.unit}")
    columns.append([f"{factor:.2f}x" if (factor := speedup(report, point)) else "-" for point in points])
    headers.append("speed-up")
    broken = [[line for part in header.split("\n") for line in textwrap.wrap(part, 11)] for header in headers]
    height = max(map(len, broken))
    return [[""] * (height - len(lines)) + lines + column for lines, column in zip(broken, columns, strict=True)]


def _header(columns: Sequence[Sequence[str]], beside: bool, width: int) -> Iterator[Text]:
    n_lines = next(i for i, cell in enumerate(columns[0]) if cell == "trial") + 1
    widths = [max(map(len, column)) for column in columns]
    for i in range(n_lines):
        line = GAP.join(column[i].rjust(size) for column, size in zip(columns, widths, strict=True))
        yield Text((line + (f"{GAP}configuration" if beside and i == n_lines - 1 else "")).rstrip(), style="bold")
    yield Text("-" * min(width, sum(widths) + len(GAP) * len(widths) + LEAST_WORDS), style="dim")


def _pick(report: StudyReport, names: Sequence[str], pick: Data, width: int) -> Iterator[Text]:
    """The recommended one in full; of the others what they are, the rest is in the README."""
    factor, recommended = speedup_words(pick), "recommended" in names
    same = report.baseline is not None and pick["trial"] == report.baseline["trial"]
    said = (
        "the baseline itself" if same else f"{factor} the baseline's throughput" if factor else "no speed-up to state"
    )
    head = f"{', '.join(title(name) for name in names)}: trial {pick['trial']}, {said}"
    yield from _wrapped(head, width, "  ", "bold green" if recommended else "", first="")
    if recommended:
        for reason in pick.get("reasons") or ():
            yield from _wrapped(f"- {reason}", width, "    ", first="  ")
        if pick.get("script_side_changes"):
            yield Text("  besides the JSON it takes:")
        for change in pick.get("script_side_changes") or ():
            yield from _wrapped(f"- {change.replace('`', '')}", width, "    ", first="  ")


def _wrapped(text: str, width: int, indent: str, style: str = "", first: str | None = None) -> Iterator[Text]:
    lead = indent if first is None else first
    lines = textwrap.wrap(
        text,
        max(20, width),
        initial_indent=lead,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    yield from (Text(line.replace("\xa0", " "), style=style) for line in lines)
