"""The result of `autotune scale`: a table for the terminal, an HTML page and a PNG with the same panels."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.report import pictures
from autotune.report.data import metric_scale
from autotune.report.figures import BLUE, GREY, Figure, axis, error_bars, scatter
from autotune.report.page.render import fill
from autotune.report.tables import aligned
from autotune.scoring.scaling import Interval, Mode, Scale
from autotune.system import files
from autotune.system.units import format_duration

NOTES = {
    "strong": "Strong scaling: the same global batch on every number of ranks.",
    "weak": "Weak scaling: the same work for every rank, so the global batch grows with the ranks.",
}
IDEAL_POINTS = 24
# Two rounds that differ give an interval of almost any length: the axis ends at this multiple of a value.
LONGEST_BAR = 1.6
LEAST_LOSS = 0.01  # a smaller share is not named
PICTURE_COLUMNS, PICTURE_HEIGHT_PX = 3, 760


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One quantity over ranks.

    Attributes:
        factor: Divisor of `values` to that unit.
        values: For each number of ranks the value and its 95 % interval, None if unknown.
        ideal: The value without losses on `x` times the fewest ranks; None if there is no such value.
    """

    title: str
    unit: str
    factor: float
    values: Sequence[tuple[int, float, Interval | None]]
    ideal: Callable[[float], float] | None

    @property
    def label(self) -> str:
        """The panel in words, for those who cannot see it."""
        return f"{self.title} over ranks; " + ", ".join(self.written(n) for n, _, _ in self.values)

    def written(self, world_size: int) -> str:
        """The value on a number of ranks with its interval, in words."""
        value, ends = next((value, ends) for n, value, ends in self.values if n == world_size)
        span = f" ({self._number(ends[0])} to {self._number(ends[1])})" if ends else ""
        return f"{world_size} rank{'s' * (world_size != 1)}: {self._number(value)}{span} {self.unit}"

    def _number(self, value: float) -> str:
        return f"{value / self.factor:,.3g}" if value < 1000 * self.factor else f"{value / self.factor:,.0f}"


def panels(found: Sequence[Scale], mode: Mode) -> list[Panel]:
    """The panels: times, throughput, what follows from them, and the share of collectives."""
    first = found[0]
    times = metric_scale("step_time_s", [scale.step_s for scale in found])
    epochs = metric_scale("step_time_s", [scale.epoch_s for scale in found if scale.epoch_s])

    def panel(title: str, unit: str, factor: float, name: str, ideal: Callable[[float], float] | None) -> Panel:
        ends = {"epoch_s": "epoch_ci95", "step_s": "step_ci95"}.get(name, f"{name}_ci95")
        values = [(scale.world_size, getattr(scale, name), getattr(scale, ends)) for scale in found]
        known = [each for each in values if each[1] is not None]
        return Panel(title=title, unit=unit, factor=factor, values=known, ideal=ideal)

    def ideal_step_s(more: float) -> float:
        return first.step_s / (more if mode == "strong" else 1.0)

    drawn = [
        panel(
            "Training time: one epoch",
            epochs.unit,
            epochs.factor,
            "epoch_s",
            lambda more: (first.epoch_s or 0.0) / more,
        ),
        panel("Time of an optimizer step", times.unit, times.factor, "step_s", ideal_step_s),
        panel("Throughput", "samples/s", 1.0, "samples_per_s", lambda more: first.samples_per_s * more),
        panel("Speed-up", "times", 1.0, "speedup", lambda more: more),
        panel("Parallel efficiency", "%", 0.01, "efficiency", lambda _: 1.0),
        panel("Communication", "% of a step", 0.01, "communication", None),
    ]
    return [panel for panel in drawn if panel.values]


def rows(found: Sequence[Scale]) -> Iterator[list[str]]:
    """The table, its header first."""
    times = metric_scale("step_time_s", [scale.step_s for scale in found])
    epochs = [scale.epoch_s for scale in found if scale.epoch_s]
    epoch = metric_scale("step_time_s", epochs).quantity if max(epochs, default=0.0) < 60 else format_duration
    yield [
        "ranks", "global batch", f"step time ({times.unit})", "samples/s", "speed-up", "95 % interval", "efficiency",
        "same loss", "lost to", "one epoch",
    ]  # fmt: skip
    for scale in found:
        ends = None if scale.vague else scale.speedup_ci95
        yield [
            str(scale.world_size),
            str(scale.samples_per_step),
            times.number(scale.step_s),
            f"{scale.samples_per_s:,.1f}",
            "not settled" if scale.vague else f"{scale.speedup:.2f}x",
            f"{ends[0]:.2f} to {ends[1]:.2f}" if ends else "-",
            "-" if scale.vague else f"{scale.efficiency:.0%}",
            "-" if scale.vague or scale.same_loss is None else f"{scale.same_loss:.2f}x",
            _lost(scale),
            epoch(scale.epoch_s) if scale.epoch_s else "-",
        ]


def _lost(scale: Scale) -> str:
    """What the efficiency lacks, by what takes it, the largest first."""
    losses = sorted(scale.losses.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {share:.0%}" for name, share in losses if share >= LEAST_LOSS) or "-"


def lines(found: Sequence[Scale], mode: Mode) -> Iterator[str]:
    """The table for a terminal."""
    yield NOTES[mode]
    yield from aligned(list(rows(found)))


def write(found: Mapping[Mode, Sequence[Scale]], title: str, notes: Sequence[str], path: Path) -> None:
    """Writes the page, strong and weak scaling side by side."""
    n = max(scales[-1].n_rounds for scales in found.values())
    intervals = f"bars are 95 % intervals, from {n} rounds" if n > 1 else "one round, so no intervals"
    drawn = {mode: panels(scales, mode) for mode, scales in found.items()}
    page = fill(
        "scaling.html",
        title=f"{title}: scaling",
        heading=title,
        lead=" ".join(NOTES[mode] for mode in found),
        intervals=intervals,
        notes=notes,
        ways=[
            {
                "name": mode,
                "heading": f"{mode.capitalize()} scaling",
                "panels": [{"title": panel.title, "unit": panel.unit, "label": panel.label} for panel in drawn[mode]],
                "table": list(rows(scales)),
            }
            for mode, scales in found.items()
        ],
        data={
            "figures": {
                f"panel-{mode}-{i}": {"": figure(panel)} for mode, each in drawn.items() for i, panel in enumerate(each)
            }
        },
    )
    files.write_text(path, page, sync=False)


def draw(found: Mapping[Mode, Sequence[Scale]], picture: Path) -> None:
    """Writes the panels as PNG, one file for each way of scaling, named for it where there are two."""
    several = len(found) > 1
    figures = {
        picture.with_stem(f"{picture.stem}-{mode}") if several else picture: grid(panels(scales, mode))
        for mode, scales in found.items()
    }
    pictures.write(figures, height_px=PICTURE_HEIGHT_PX)


def figure(panel: Panel) -> Figure:
    """A panel as a plotly figure, from zero up: the measurements with their intervals, and the ideal."""
    ranks = [n for n, _, _ in panel.values]
    fewest, most = ranks[0], ranks[-1]
    between = [fewest + (most - fewest) * i / IDEAL_POINTS for i in range(IDEAL_POINTS + 1)]
    ideal = [panel.ideal(n / fewest) / panel.factor for n in between] if panel.ideal else []
    values = [value / panel.factor for _, value, _ in panel.values]
    known = [(value, *(found or (value, value))) for _, value, found in panel.values]
    highest = max([*ideal, *(min(high, LONGEST_BAR * value) / panel.factor for value, _, high in known)])
    bars = error_bars(known, panel.factor)
    texts = [panel.written(n) for n in ranks]
    points = {"error_y": bars, "line": {"color": BLUE, "width": 2}, "marker": {"size": 9}, "hovertext": texts}
    traces = [
        scatter("ideal", between, ideal, line={"color": GREY, "width": 1.5, "dash": "dash"}),
        scatter("measured", ranks, values, "lines+markers", "%{hovertext}", **points),
    ]
    across = axis("ranks") | {"tickmode": "array", "tickvals": ranks, "range": [fewest - 0.06 * most, 1.06 * most]}
    up = axis("") | {"range": [0, 1.05 * (highest or 1.0)]}
    layout = {"hovermode": "closest", "margin": {"l": 52, "r": 12, "t": 12, "b": 46}, "xaxis": across, "yaxis": up}
    return {"data": [trace for trace in traces if trace["y"]], "layout": layout}


def grid(drawn: Sequence[Panel]) -> Figure:
    """All panels in one figure, in rows of three."""
    from plotly.subplots import make_subplots

    titles = [f"{panel.title} ({panel.unit})" for panel in drawn]
    found = make_subplots(
        -(-len(drawn) // PICTURE_COLUMNS), PICTURE_COLUMNS, subplot_titles=titles, vertical_spacing=0.2
    )
    for i, panel in enumerate(drawn):
        own, place = figure(panel), {"row": i // PICTURE_COLUMNS + 1, "col": i % PICTURE_COLUMNS + 1}
        for trace in own["data"]:
            found.add_trace(trace | {"showlegend": i == 0}, **place)
        found.update_xaxes(own["layout"]["xaxis"], **place)
        found.update_yaxes(own["layout"]["yaxis"], **place)
    found.update_layout(legend={"orientation": "h", "y": -0.16, "yanchor": "top"})
    return dict(found.to_dict())
