"""`autotune scale`: the table for a terminal, and a page with a plot that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from autotune import files
from autotune.analysis.scaling import Mode, Scale
from autotune.report import units
from autotune.report.elements import Html, each, el, group

WIDTH, HEIGHT, LEFT, BOTTOM = 560, 360, 62, 46
NOTES = {
    "strong": "Strong scaling: the same global batch on every number of ranks.",
    "weak": "Weak scaling: the same work for every rank, so the global batch grows with the ranks.",
}


def rows(found: Sequence[Scale]) -> Iterator[list[str]]:
    """The table, its header first."""
    times = units.scale("step_time_s", [scale.step_s for scale in found])
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
            units.duration(scale.epoch_s) if scale.epoch_s else "-",
        ]


def lines(found: Sequence[Scale], mode: Mode) -> Iterator[str]:
    """The table for a terminal."""
    table = list(rows(found))
    wide = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    yield NOTES[mode]
    yield from ("  ".join(cell.rjust(size) for cell, size in zip(row, wide, strict=True)) for row in table)


def write(found: Sequence[Scale], mode: Mode, title: str, notes: Sequence[str], path: Path) -> None:
    """Writes the page."""
    style = (resources.files("autotune.report") / "page.css").read_text(encoding="utf-8")
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
                el("h2", "Speed-up"),
                el("div", _plot(found), class_="card"),
                el("h2", "Figures"),
                el("div", _table(header, body), class_="scroll", tabindex=0),
                group(el("h2", "What to know"), el("ul", each(el("li", note) for note in notes), class_="plain")) if notes else None,
                el("footer", "This page is one file and makes no request."),
            ),
        ),
        lang="en",
    )
    files.write_text(path, f"<!doctype html>\n{page}\n", sync=False)


def _table(header: Sequence[str], body: Sequence[Sequence[str]]) -> Html:
    head = el("tr", each(el("th", el("button", name, type="button", disabled=True), scope="col", class_="n") for name in header))
    lines_ = each(el("tr", el("th", row[0], scope="row"), each(el("td", cell, class_="n") for cell in row[1:])) for row in body)
    return el("table", el("thead", head), el("tbody", lines_), class_="trials")


def _plot(found: Sequence[Scale]) -> Html:
    """Speed-up over ranks as SVG: measured with its interval, and the ideal as a dashed line."""
    fewest, most = found[0].world_size, found[-1].world_size
    top = max(most / fewest, *(scale.speedup_ci95[1] if scale.speedup_ci95 else scale.speedup for scale in found)) * 1.05

    def x(ranks: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * ((ranks - fewest) / (most - fewest) if most > fewest else 0.5)

    def y(speedup: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 16) * speedup / top

    def line(x1: float, y1: float, x2: float, y2: float, ink: str, width: float, dash: str = "none") -> Html:
        style = f"stroke:var({ink});stroke-width:{width};stroke-dasharray:{dash}"
        return el("line", x1=f"{x1:.1f}", y1=f"{y1:.1f}", x2=f"{x2:.1f}", y2=f"{y2:.1f}", style=style)

    def text(words: str, at_x: float, at_y: float, anchor: str = "middle") -> Html:
        return el("text", words, x=f"{at_x:.1f}", y=f"{at_y:.1f}", text_anchor=anchor, class_="tick")

    step = max(1, round(top / 5)) if top > 2.5 else 0.5
    ticks = [i * step for i in range(int(top / step) + 1)]
    marks = [group(line(LEFT, y(t), WIDTH - 20, y(t), "--line", 1), text(f"{t:g}x", LEFT - 8, y(t) + 4, "end")) for t in ticks]
    marks += [text(str(scale.world_size), x(scale.world_size), HEIGHT - BOTTOM + 20) for scale in found]
    marks.append(text("ranks", (LEFT + WIDTH) / 2, HEIGHT - 6))
    marks.append(line(x(fewest), y(1), x(most), y(most / fewest), "--muted", 1.5, "5 4"))
    path = " ".join(f"{x(scale.world_size):.1f},{y(scale.speedup):.1f}" for scale in found)
    marks.append(el("polyline", points=path, style="fill:none;stroke:var(--accent);stroke-width:2"))
    for scale in found:
        if scale.speedup_ci95:
            low, high = scale.speedup_ci95
            marks.append(line(x(scale.world_size), y(low), x(scale.world_size), y(high), "--accent", 1.5))
        marks.append(el("circle", cx=f"{x(scale.world_size):.1f}", cy=f"{y(scale.speedup):.1f}", r=5, style="fill:var(--accent)"))
    label = "Speed-up over ranks; dashed is the ideal; the table holds the same"
    return el(
        "svg",
        *marks,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=label,
        style="width:100%;max-width:760px;display:block;margin:0 auto",
    )
