"""The figures that compare trials: the front over two metrics, and parallel axes of knobs and objectives."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import combinations
from typing import Any

from autotune.report import series, tables
from autotune.report.data import Data, StudyReport, interval, measured, metric_scale
from autotune.report.figures import (
    BLUE,
    CYCLE,
    GREY,
    ORANGE,
    RED,
    Figure,
    Trace,
    axis,
    error_bars,
    figure,
    layout,
    metric_label,
    scatter,
    spans_decade,
    trial_text,
)
from autotune.report.series import level_text, rounded
from autotune.scoring import pareto
from autotune.scoring.metrics import METRICS

# Colours of the parallel lines, from the worst value of the metric to the best; lines of one colour are one trace.
WORST, BEST, N_SHADES = (201, 112, 58), (59, 118, 232), 8
AXIS_WIDTH_PX = 92
# Positions of a name beside its point, each with the shift of the name's centre in widths and heights of the name.
NAME_PLACES = {"top right": (0.6, 1), "bottom right": (0.6, -1), "top left": (-0.6, 1), "bottom left": (-0.6, -1)}
# A figure as it is mostly seen, for the names' sizes.
PLOT_WIDTH_PX, PLOT_HEIGHT_PX, LETTER_PX, LINE_PX = 1000, 380, 7, 16

MARKERS = {
    "tried": {"size": 7, "color": GREY},
    "front": {"size": 9, "color": BLUE},
    "pick": {"size": 13, "color": ORANGE},
    "baseline": {"size": 13, "color": RED, "symbol": "diamond"},
}


def fronts(report: StudyReport, metrics: Sequence[str] | None = None) -> dict[str, Figure]:
    """The front over every two of some metrics (by default all, objectives first) that one trial has both of, by `metric|metric`."""
    columns = _Columns(report)
    names = [name for name in columns.scales if metrics is None or name in metrics]
    drawn = {f"{x}|{y}": _front(report, columns, x, y) for x, y in combinations(names, 2)}
    return {pair: figure for pair, figure in drawn.items() if figure}


def front(report: StudyReport, x: str, y: str) -> Figure:
    """The trials over two metrics: those on the front, the picks and the baseline are marked; empty if none has both."""
    return _front(report, _Columns(report), x, y)


class _Columns:
    """Values, intervals, hover texts and scales of all points, worked out once for all figures of the front."""

    def __init__(self, report: StudyReport) -> None:
        points, marks = report.compared, report.marks
        self._report = report
        self.points = list(points.values())
        self.values = {number: _read(point) for number, point in points.items()}
        seen = {name for found in self.values.values() for name in found}
        self.scales = tables.scales_of(self.points, [name for name in report.metric_names() if name in seen])
        # A trial that was picked for five things is named for the first: there is no room for more beside a point.
        self.names = {
            number: ", ".join(dict.fromkeys([found[0], *(["baseline"] if "baseline" in found else [])]))
            for number, found in marks.items()
        }
        self.base = {number for number, found in marks.items() if "baseline" in found}
        self.picked = marks.keys() - self.base
        self.texts = {number: self._text(point) for number, point in points.items()}

    def _text(self, point: Data) -> str:
        lines = [trial_text(self._report, point["trial"])]
        for name, value in self.values[point["trial"]].items():
            if name in self.scales:
                low, high = (self.scales[name].number(end) for end in interval(point, name, value))
                span = f" ({low}–{high})" if low != high else ""
                lines.append(f"{METRICS[name].label}: {self.scales[name].quantity(value)}{span}")
        return "<br>".join(lines)

    def axis(self, points: Sequence[Data], name: str) -> list[float]:
        """The values of a metric in the unit of its axis."""
        return [rounded(self.values[point["trial"]][name] / self.scales[name].factor) for point in points]

    def bars(self, points: Sequence[Data], name: str) -> dict[str, Any]:
        """The 95 % intervals of a metric in the unit of its axis."""
        found = [(value, *interval(p, name, value)) for p in points for value in [self.values[p["trial"]][name]]]
        return error_bars(found, self.scales[name].factor)


def _read(point: Data) -> dict[str, float]:
    """The metrics that were measured to their end; one that is extrapolated compares with nothing."""
    return {name: value for name, value in measured(point).items() if name not in (point.get("censored") or ())}


def _front(report: StudyReport, columns: _Columns, x: str, y: str) -> Figure:
    points = [p for p in columns.points if x in columns.values[p["trial"]] and y in columns.values[p["trial"]]]
    if not points:
        return {}
    on_front = {point["trial"] for point in report.front}
    groups: dict[str, list[Data]] = {"tried": [], "front": [], "pick": [], "baseline": []}
    for point in points:
        number = point["trial"]
        is_pick = "pick" if number in columns.picked else "front" if number in on_front else "tried"
        groups["baseline" if number in columns.base else is_pick].append(point)
    logs = tuple(all(value > 0 for value in columns.axis(points, name)) for name in (x, y))
    named = {point["trial"]: _at(columns, point, x, y, logs) for point in groups["pick"] + groups["baseline"]}
    around = [_at(columns, point, x, y, logs) for point in points]
    places = _name_places([(columns.names[trial], *at) for trial, at in named.items()], around)
    sides = dict(zip(named, places, strict=True))
    traces = [_stairs(columns, points, x, y)]
    for name, members in groups.items():
        trials = [point["trial"] for point in members]
        more: Trace = {"marker": MARKERS[name], "hovertext": [columns.texts[trial] for trial in trials]}
        if name != "tried":  # thousands of bars would hide the points
            more |= {"error_x": columns.bars(members, x), "error_y": columns.bars(members, y)}
        if name in ("pick", "baseline"):
            more |= {"text": [columns.names[trial] for trial in trials], "cliponaxis": False}
            more["textposition"] = [sides[trial] for trial in trials]
        mode = "markers+text" if "text" in more else "markers"
        traces.append(scatter(name, columns.axis(members, x), columns.axis(members, y), mode, "%{hovertext}", **more))
    axes = (
        axis(metric_label(name, columns.scales[name]), columns.axis(points, name), log=log)
        for name, log in zip((x, y), logs, strict=True)
    )
    return figure(traces, *axes)


def _at(columns: _Columns, point: Data, x: str, y: str, logs: tuple[bool, ...]) -> tuple[float, float]:
    """Where a point lies on the axes, as linear coordinates."""
    values = (columns.axis([point], name)[0] for name in (x, y))
    across, up = (math.log10(value) if log else value for value, log in zip(values, logs, strict=True))
    return across, up


def _stairs(columns: _Columns, points: Sequence[Data], x: str, y: str) -> Trace:
    """The front of these two metrics alone; the line turns at corners that are known to be reachable."""
    signs = {name: -1 if METRICS[name].direction == "minimize" else 1 for name in (x, y)}
    gains = [[sign * columns.values[point["trial"]][name] for name, sign in signs.items()] for point in points]
    kept = [points[i] for i in sorted(pareto.front(gains), key=lambda i: -gains[i][0])]
    line = {"color": BLUE, "width": 1.5, "shape": "hv", "dash": "dot"}
    places = columns.axis(kept, x), columns.axis(kept, y)
    return scatter("front of these two", *places, showlegend=False, opacity=0.7, line=line)


def _name_places(named: Sequence[tuple[str, float, float]], points: Sequence[tuple[float, float]]) -> list[str]:
    """On which side of its point each name hides the fewest points and other names, and stays between the outermost points."""
    spans = [max((max(axis) - min(axis)), 1e-12) for axis in zip(*points, strict=True)] if points else [1.0, 1.0]
    pixels = (PLOT_WIDTH_PX / spans[0], PLOT_HEIGHT_PX / spans[1])
    taken: list[tuple[float, float, float]] = [(x * pixels[0], y * pixels[1], 0.0) for x, y in points]
    places, left, right = [], min(x for x, *_ in taken), max(x for x, *_ in taken)
    for text, x, y in named:
        half, options = LETTER_PX * len(text) / 2, []
        for n, (place, (across, up)) in enumerate(NAME_PLACES.items()):
            at = (x * pixels[0] + across * (2 * half + 8), y * pixels[1] + up * LINE_PX, half)
            hidden = sum(abs(each[0] - at[0]) < half + each[2] + 6 and abs(each[1] - at[1]) < LINE_PX for each in taken)
            options.append((hidden, max(0.0, left - (at[0] - half), at[0] + half - right), n, place, at))
        *_, place, at = min(options)
        places.append(place)
        taken.append(at)
    return places


def parallel(report: StudyReport, metric: str) -> Figure:
    """A line for each trial through its knobs and objectives, coloured by a metric."""
    levels, values = series.knobs(report), {number: measured(point) for number, point in report.compared.items()}
    seen = [name for name in report.objectives if any(name in found for found in values.values())]
    metrics = [*seen, *([metric] if metric not in seen else [])]
    points = [point for number, point in report.compared.items() if metric in values[number]]
    rulers = {
        name: _ruler([values[p["trial"]][name] for p in points if name in values[p["trial"]]]) for name in metrics
    }
    places = {name: {repr(level): i for i, level in enumerate(found)} for name, found in levels.items()}
    n_axes, marks = len(levels) + len(metrics), report.marks

    def line(n: int, point: Data) -> list[float | None]:
        # Lines through one value are spread a little: they would cover each other otherwise.
        spread = 0.018 * (((n * 0.618) % 1) * 2 - 1)
        knobs = [
            round(place[repr(point["candidate"].get(name))] / (len(place) - 1) + spread, 3)
            for name, place in places.items()
        ]
        own = values[point["trial"]]
        return [*knobs, *(round(rulers[name](own[name]), 3) if name in own else None for name in metrics), None]

    shades: dict[int, list[tuple[int, Data]]] = {}
    for n, point in enumerate(points):
        place = rulers[metric](values[point["trial"]][metric])
        good = 1 - place if METRICS[metric].direction == "minimize" else place
        shades.setdefault(min(N_SHADES - 1, int(good * N_SHADES)), []).append((n, point))
    opacity = max(0.15, min(0.7, 60 / (len(points) + 1)))
    label, traces = METRICS[metric].label, []
    for shade, members in sorted(shades.items()):
        name = {0: f"worst {label}", N_SHADES - 1: f"best {label}"}.get(shade, "")
        color = _mixed(shade / (N_SHADES - 1))
        traces.append(_parallel_trace(line, members, name, {"color": color, "width": 1.3}, opacity))
    picks = [(n, p) for n, p in enumerate(points) if p["trial"] in marks]
    for i, (n, point) in enumerate(picks):
        names = marks[point["trial"]]
        color = RED if "baseline" in names else CYCLE[1 + i % 3]
        style = {"color": color, "width": 2.5, "dash": "dash" if "baseline" in names else "solid"}
        traces.append(_parallel_trace(line, [(n, point)], ", ".join(names), style, 1.0))
    titles = [
        _broken(name) for name in (*series.short_names(levels).values(), *(METRICS[name].label for name in metrics))
    ]
    across = {"tickmode": "array", "tickvals": list(range(n_axes)), "ticktext": titles, "tickangle": 0, "side": "top"}
    across |= {"fixedrange": True, "range": [-0.5, n_axes - 0.5], "zeroline": False}
    hidden = {"visible": False, "range": [-0.06, 1.06], "fixedrange": True}
    notes = _level_notes(levels) + _range_notes(report, metrics, len(levels))
    placed = {
        **layout(),
        "xaxis": across,
        "yaxis": hidden,
        "annotations": notes,
        "meta": {"width": AXIS_WIDTH_PX * n_axes},
    }
    return {"data": traces, "layout": placed | {"margin": {"l": 20, "r": 20, "t": 84, "b": 20}}}


def _parallel_trace(
    line: Callable[[int, Data], list[float | None]],
    members: Sequence[tuple[int, Data]],
    name: str,
    style: Data,
    opacity: float,
) -> Trace:
    """One trace for several trials; `meta` says which, each with one value for every axis and a gap."""
    lines = [line(n, point) for n, point in members]
    trials, size = [point["trial"] for _, point in members], len(lines[0])
    own = f", {escape(name)}" if len(trials) == 1 and name else ""
    more: Trace = {
        "customdata": [trial for trial in trials for _ in range(size)],
        "meta": trials,
        "showlegend": bool(name),
    }
    x, y = [*range(size - 1), None] * len(lines), [value for values in lines for value in values]
    return scatter(name, x, y, hover="trial %{customdata}" + own, line=style, opacity=opacity, **more)


def _level_notes(levels: Mapping[str, Sequence[Any]]) -> list[Data]:
    """The values on the axes of knobs; `name` is `axis|level`, for the page, where they are chosen."""
    return [
        _note(position, level / (len(found) - 1), level_text(value), name=f"{position}|{level}", captureevents=True)
        for position, found in enumerate(levels.values())
        for level, value in enumerate(found)
    ]


def _range_notes(report: StudyReport, metrics: Sequence[str], first_axis: int) -> list[Data]:
    """The least and the most on the axes of metrics."""
    notes = []
    for position, name in enumerate(metrics, start=first_axis):
        values = [measured(point)[name] for point in report.compared.values() if name in measured(point)]
        for place, value in ((0, min(values, default=0.0)), (1, max(values, default=0.0))):
            notes.append(_note(position, place, metric_scale(name, values).quantity(value)))
    return notes


def _note(x: float, y: float, text: str, **more: Any) -> Data:
    ground = "rgba(255,255,255,0.85)"
    shown = escape(text if len(text) <= 18 else text[:17] + "…")
    return {"x": x, "y": y, "text": shown, "showarrow": False, "bgcolor": ground, "font": {"size": 12}, **more}


def _ruler(values: Sequence[float]) -> Callable[[float], float]:
    """The place of a value between the least and the most, by ratios where they span more than a decade."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    along = math.log if spans_decade(values) else float
    return (lambda _: 0.5) if high == low else (lambda value: (along(value) - along(low)) / (along(high) - along(low)))


def _mixed(share: float) -> str:
    parts = (round(worst + share * (best - worst)) for worst, best in zip(WORST, BEST, strict=True))
    return f"rgb({','.join(map(str, parts))})"


def _broken(name: str) -> str:
    """A name in lines of about twelve letters, broken at its joints."""
    lines = [""]
    for part in name.replace("_", "_ ").split(" "):
        joint = "" if lines[-1].endswith("_") or not lines[-1] else " "
        if lines[-1] and len(lines[-1] + part) > 12:
            lines.append(part)
        else:
            lines[-1] += joint + part
    return "<br>".join(escape(line) for line in lines[:4])
