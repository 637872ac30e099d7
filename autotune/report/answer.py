"""The answer for a terminal; it reads the same in a pipe, and no number is ever cut."""

import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from autotune.errors import wrapped
from autotune.report import tables
from autotune.report.data import Data, StudyReport, titles
from autotune.report.gains import pick_words
from autotune.report.next_steps import next_steps
from autotune.report.readme import extent, machine, subject

LEAST_WORDS = 24  # letters; with less room a configuration stands on the next line
GAP = "  "


@dataclass(frozen=True)
class Answer:
    """What a study found, for rich to print: the front as a table, the picks, the speed-up over the baseline."""

    report: StudyReport
    written: Sequence[str] = ()

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        yield from _lines(self.report, self.written, options.max_width)


def _lines(report: StudyReport, written: Sequence[str], width: int) -> Iterator[Text]:
    yield from _wrapped(
        f"{report.name}: {subject(report)}, {machine(report)}: {extent(report)}", width, "  ", "bold", first=""
    )
    yield Text()
    yield from _table(report, width)
    if not report.picks:
        yield from _wrapped(f"Nothing to recommend: {report.why_nothing}.", width, "  ", first="")
    for names, pick in report.picks_by_trial():
        yield from _pick(report, names, pick, width)
    for said, texts, style in (("note", report.caveats(), "dim"), ("next", next_steps(report), "")):
        if texts:
            yield Text()
        for text in texts:
            yield from _wrapped(f"{said}: {text}", width, "      ", style, first="")
    if written:
        yield Text()
        yield Text("Written:")
        yield from (Text(f"  {min(path, os.path.relpath(path), key=len)}", overflow="fold") for path in written)


def _table(report: StudyReport, width: int) -> Iterator[Text]:
    scales, rows = tables.overview(report)
    if not rows:
        return
    heads = (
        "\n".join(line for part in head.split("\n") for line in textwrap.wrap(part, 11))
        for head in tables.heads(scales, "{label}\n{unit}")
    )
    lines = list(tables.aligned([list(heads), *(row.line(scales, "-") for row in rows)]))
    *above, last = lines[: -len(rows)]
    taken = len(last) + len(GAP)
    room = width - taken
    for line in (*above, last + f"{GAP}configuration" * (room >= LEAST_WORDS)):
        yield Text(line, style="bold")
    yield Text("-" * min(width, taken + LEAST_WORDS), style="dim")
    for row, numbers in zip(rows, lines[-len(rows) :], strict=True):
        style = "bold green" if "recommended" in row.marks else "dim" if row.marks == ["baseline"] else ""
        text = row.configuration + (f"  <-\xa0{', '.join(row.marks)}" if row.marks else "")
        if room < max(LEAST_WORDS, *map(len, text.split(" "))):
            yield Text(numbers, style=style)
            yield from _wrapped(text, width, "       ", style)
            continue
        first, *rest = wrapped(text, room) or [""]
        for line in (f"{numbers}{GAP}{first}", *(" " * taken + more for more in rest)):
            yield Text(line, style=style)
    yield Text()


def _pick(report: StudyReport, names: Sequence[str], pick: Data, width: int) -> Iterator[Text]:
    """A pick in one line; below the recommended one its reasons and the changes of the script."""
    head = f"{titles(names)}: trial {pick['trial']}, {pick_words(report, names, pick)}"
    yield from _wrapped(head, width, "  ", "bold green" if "recommended" in names else "", first="")
    if "recommended" not in names:
        return
    changes = pick.get("script_side_changes") or ()
    for reason in pick.get("reasons") or ():
        yield from _wrapped(f"- {reason}", width, "    ", first="  ")
    if changes:
        yield from _wrapped("besides the JSON, change this in your training:", width, "  ")
    for change in changes:
        yield from _wrapped(f"- {change}", width, "    ", first="  ")


def _wrapped(text: str, width: int, indent: str, style: str = "", first: str | None = None) -> Iterator[Text]:
    for line in wrapped(text, max(20, width), indent if first is None else first, indent):
        yield Text(line, style=style, no_wrap=True, overflow="ignore")
