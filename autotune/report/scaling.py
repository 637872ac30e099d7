"""`autotune scale`: the table for a terminal, and a page with plots that needs nothing but itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from autotune import files
from autotune.analysis.scaling import Interval, Mode, Scale
from autotune.report import browser, units
from autotune.report.elements import Html, each, el, group

NOTES = {
    "strong": "Strong scaling: the same global batch on every number of ranks.",
    "weak": "Weak scaling: the same work for every rank, so the global batch grows with the ranks.",
}
# A panel in units of its own, about a pixel each on a phone and a little more on a wide screen.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 340, 230, 54, 14, 12, 40
STYLE = """
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 16px; margin-top: 14px; }
.panels .card { padding: 16px 16px 12px; }
.panels h3 { margin: 0 0 4px; font-size: 1rem; font-weight: 650; color: var(--text); }
.panels h3 .muted { font-weight: 450; }
.panels svg { display: block; width: 100%; }
.panels text { fill: var(--muted); font-size: 12px; font-variant-numeric: tabular-nums; }
.panels .grid { stroke: var(--line); stroke-width: 1; }
.panels .ideal { fill: none; stroke: var(--muted); stroke-width: 1.5; stroke-dasharray: 5 4; }
.panels .joined { fill: none; stroke: var(--accent); stroke-width: 2; }
.panels .spread { stroke: var(--accent); stroke-width: 1.5; }
.panels circle { fill: var(--accent); }
"""
IDEAL_POINTS = 24
MOST_OF_A_BAR = 1.6
# Of a picture: three panels beside each other, sharp on any screen.
PNG_WIDTH, PNG_HEIGHT, PNG_SCALE = 1240, 900, 2.0


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One quantity over ranks.

    Attributes:
        title: What it is.
        unit: Its unit for people.
        factor: What values are divided by to be in that unit.
        values: For each rank count the value and its interval; None where one is not known.
        ideal: What it would be on so many times the fewest ranks if nothing were lost; None where there is no such thing.
    """

    title: str
    unit: str
    factor: float
    values: Sequence[tuple[int, float, Interval | None]]
    ideal: Callable[[float], float] | None

    def written(self, value: float) -> str:
        """A value for people."""
        return (
            f"{value / self.factor:,.3g} {self.unit}"
            if value < 1000 * self.factor
            else f"{value / self.factor:,.0f} {self.unit}"
        )


def panels(found: Sequence[Scale], mode: Mode) -> list[Panel]:
    """What is plotted: times and throughput, what follows from them, and what collectives took."""
    first = found[0]
    times = units.scale("step_time_s", [scale.step_s for scale in found])
    epochs = units.scale("step_time_s", [scale.epoch_s for scale in found if scale.epoch_s])
    drawn = [
        Panel(
            title="Training time: one epoch", unit=epochs.unit, factor=epochs.factor,
            values=[(scale.world_size, scale.epoch_s, scale.epoch_ci95) for scale in found if scale.epoch_s is not None],
            ideal=lambda times_more: (first.epoch_s or 0.0) / times_more,
        ),
        Panel(
            title="Time of an optimizer step", unit=times.unit, factor=times.factor,
            values=[(scale.world_size, scale.step_s, scale.step_ci95) for scale in found],
            ideal=lambda times_more: first.step_s / (times_more if mode == "strong" else 1.0),
        ),
        Panel(
            title="Throughput", unit="samples/s", factor=1.0,
            values=[(scale.world_size, scale.samples_per_s, scale.samples_per_s_ci95) for scale in found],
            ideal=lambda times_more: first.samples_per_s * times_more,
        ),
        Panel(
            title="Speed-up", unit="times", factor=1.0,
            values=[(scale.world_size, scale.speedup, scale.speedup_ci95) for scale in found],
            ideal=lambda times_more: times_more,
        ),
        Panel(
            title="Parallel efficiency", unit="%", factor=0.01,
            values=[(scale.world_size, scale.efficiency, scale.efficiency_ci95) for scale in found],
            ideal=lambda _: 1.0,
        ),
        Panel(
            title="Communication", unit="% of a step", factor=0.01,
            values=[(s.world_size, s.communication, s.communication_ci95) for s in found if s.communication is not None],
            ideal=None,
        ),
    ]  # fmt: skip
    return [panel for panel in drawn if panel.values]


def rows(found: Sequence[Scale]) -> Iterator[list[str]]:
    """The table, its header first."""
    times = units.scale("step_time_s", [scale.step_s for scale in found])
    epochs = [scale.epoch_s for scale in found if scale.epoch_s]
    epoch = units.scale("step_time_s", epochs).quantity if max(epochs, default=0.0) < 60 else units.duration
    yield ["ranks", "global batch", f"step time ({times.unit})", "samples/s", "speed-up", "95 % interval", "efficiency", "serial share",
           "communication", "one epoch"]  # fmt: skip
    for scale in found:
        ends = scale.speedup_ci95
        yield [
            str(scale.world_size),
            str(scale.samples_per_step),
            times.number(scale.step_s),
            f"{scale.samples_per_s:,.1f}",
            f"{scale.speedup:.2f}x",
            f"{ends[0]:.2f} to {ends[1]:.2f}" if ends else "-",
            f"{scale.efficiency:.0%}",
            "-" if scale.serial_share is None else f"{scale.serial_share:.0%}",
            "-" if scale.communication is None else f"{scale.communication:.0%}",
            epoch(scale.epoch_s) if scale.epoch_s else "-",
        ]


def lines(found: Sequence[Scale], mode: Mode) -> Iterator[str]:
    """The table for a terminal."""
    table = list(rows(found))
    wide = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    yield NOTES[mode]
    yield from ("  ".join(cell.rjust(size) for cell, size in zip(row, wide, strict=True)) for row in table)


def write(found: Sequence[Scale], mode: Mode, title: str, notes: Sequence[str], path: Path) -> None:
    """Writes the page."""
    style = (resources.files("autotune.report") / "page.css").read_text(encoding="utf-8") + STYLE
    header, *body = rows(found)
    page = el(
        "html",
        el(
            "head",
            el("meta", charset="utf-8"),
            el("meta", http_equiv="Content-Security-Policy", content="default-src 'none'; style-src 'unsafe-inline'"),
            el("meta", name="viewport", content="width=device-width, initial-scale=1"),
            el("meta", name="color-scheme", content="light dark"),
            el("title", f"{title}: scaling"),
            el("style", Html(style)),
        ),
        el(
            "body",
            el("header", el("h1", title), el("p", NOTES[mode], class_="muted"), class_="top"),
            el(
                "main",
                el("h2", "Over ranks"),
                el("p", _legend(found), class_="note"),
                el("div", each(_panel(each_) for each_ in panels(found, mode)), class_="panels"),
                el("h2", "Figures"),
                el("div", _table(header, body), class_="scroll", tabindex=0),
                group(el("h2", "What to know"), el("ul", each(el("li", note) for note in notes), class_="plain"))
                if notes
                else None,
                el("footer", "This page is one file and makes no request."),
            ),
        ),
        lang="en",
    )
    files.write_text(path, f"<!doctype html>\n{page}\n", sync=False)


def draw(page: Path, picture: Path) -> None:
    """The plots of a page as one PNG, drawn by an installed Chromium.

    Raises:
        BrowserError: There is no browser.
    """
    with browser.browsing() as tab:
        tab.view(PNG_WIDTH, PNG_HEIGHT, scale=PNG_SCALE)
        tab.open(page.absolute().as_uri())
        files.write_bytes(picture, tab.picture(".panels"), sync=False)


def _legend(found: Sequence[Scale]) -> str:
    bars = (
        f"bars are 95 % intervals, from {found[-1].n_rounds} rounds"
        if found[-1].n_rounds > 1
        else "one round, so no intervals"
    )
    return f"Dashed is what it would be if nothing were lost; {bars}. The table below holds the same."


def _table(header: Sequence[str], body: Sequence[Sequence[str]]) -> Html:
    head = el(
        "tr",
        each(el("th", el("button", name, type="button", disabled=True), scope="col", class_="n") for name in header),
    )
    lines_ = each(
        el("tr", el("th", row[0], scope="row"), each(el("td", cell, class_="n") for cell in row[1:])) for row in body
    )
    return el("table", el("thead", head), el("tbody", lines_), class_="trials")


def _panel(panel: Panel) -> Html:
    """A panel as SVG, from zero up: what was measured with its intervals, and the ideal."""
    ranks = [n for n, _, _ in panel.values]
    fewest, most = ranks[0], ranks[-1]
    ideal = [(n, panel.ideal(n / fewest)) for n in _between(fewest, most)] if panel.ideal else []
    # Two rounds that differ give an interval without end: it is cut off, rather than everything else made flat.
    highest = [value if ends is None else min(ends[1], MOST_OF_A_BAR * value) for _, value, ends in panel.values]
    ticks = _ticks(max([*highest, *(value for _, value in ideal)]))

    def x(n: float) -> float:
        share = (n - fewest) / (most - fewest) if most > fewest else 0.5
        # Off the axes, so that a bar is told from them.
        return LEFT + (WIDTH - LEFT - RIGHT) * (0.06 + 0.88 * share)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * min(value / ticks[-1], 1.0)

    def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Html:
        return el("line", x1=f"{x1:.1f}", y1=f"{y1:.1f}", x2=f"{x2:.1f}", y2=f"{y2:.1f}", class_=class_)

    def text(words: str, at_x: float, at_y: float, anchor: str = "middle") -> Html:
        return el("text", words, x=f"{at_x:.1f}", y=f"{at_y:.1f}", text_anchor=anchor)

    def joined(points: Sequence[tuple[float, float]], class_: str) -> Html:
        return el("polyline", points=" ".join(f"{x(n):.1f},{y(value):.1f}" for n, value in points), class_=class_)

    marks = [line(LEFT, y(t), WIDTH - RIGHT, y(t), "grid") for t in ticks]
    marks += [text(f"{t / panel.factor:,.10g}", LEFT - 6, y(t) + 4, "end") for t in ticks]
    marks += [text(str(n), x(n), HEIGHT - BOTTOM + 16) for n in ranks]
    marks.append(text("ranks", (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5))
    marks += [joined(ideal, "ideal"), joined([(n, value) for n, value, _ in panel.values], "joined")]
    for n, value, ends in panel.values:
        said = panel.written(value)
        if ends:
            said += f" ({panel.written(ends[0])} to {panel.written(ends[1])})"
            marks.append(line(x(n), y(ends[0]), x(n), y(ends[1]), "spread"))
            marks += [line(x(n) - 4, y(end), x(n) + 4, y(end), "spread") for end in ends if end <= ticks[-1]]
        marks.append(el("circle", el("title", f"{n} ranks: {said}"), cx=f"{x(n):.1f}", cy=f"{y(value):.1f}", r=4.5))
    label = f"{panel.title} over ranks; " + ", ".join(f"{n}: {panel.written(value)}" for n, value, _ in panel.values)
    svg = el("svg", *marks, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label)
    return el("div", el("h3", panel.title, el("span", f" ({panel.unit})", class_="muted")), svg, class_="card")


def _between(fewest: int, most: int) -> list[float]:
    return [fewest + (most - fewest) * i / IDEAL_POINTS for i in range(IDEAL_POINTS + 1)]


def _ticks(top: float) -> list[float]:
    """Round values from zero to just above the largest: four to eight of them."""
    rough = (top or 1.0) * 1.02 / 5
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough)
    return [step * i for i in range(math.ceil((top or 1.0) * 1.02 / step) + 1)]
