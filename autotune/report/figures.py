"""The front as plotly figures, for Optuna's dashboard; the page of `report.html` draws its own."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from autotune.objective import METRICS
from autotune.report import Data, StudyReport, interval, measured, units, words

if TYPE_CHECKING:
    import plotly.graph_objects as go

# They read on a light ground and on a dark one: the dashboard has both.
TRIED, FRONT, PICK, BASELINE = "#8b9098", "#3b76e8", "#e08a2e", "#d0405a"
HEIGHT_PX = 460


def front(report: StudyReport) -> dict[str, go.Figure]:
    """The front over the first two objectives, and over the first three where there are as many; by an id.

    Bars are 95 % intervals; the baseline and the picks are marked.
    """
    names = report.metric_names(all_metrics=False)
    if len(names) < 2:
        names = report.metric_names()[:2]
    if len(names) < 2 or not report.points():
        return {}
    found = {"autotune-front": _figure(report, names[:2])}
    if len(names) > 2:
        found["autotune-front-3d"] = _figure(report, names[:3])
    return found


def _figure(report: StudyReport, names: Sequence[str]) -> go.Figure:
    import plotly.graph_objects as go

    marks, on_front = report.marks(), {point["trial"] for point in report.front}
    points = [point for point in report.points().values() if all(name in measured(point) for name in names)]
    scales = {name: units.scale(name, [measured(point)[name] for point in points]) for name in names}
    named = {number for number, found in marks.items() if found != ["baseline"]}
    base = {number for number, found in marks.items() if "baseline" in found}
    groups = [
        ("tried", [p for p in points if p["trial"] not in on_front | named | base], 7, {"color": TRIED}),
        ("front", [p for p in points if p["trial"] in on_front - named - base], 9, {"color": FRONT}),
        ("pick", [p for p in points if p["trial"] in named - base], 13, {"color": PICK}),
        ("baseline", [p for p in points if p["trial"] in base], 13, {"color": BASELINE, "symbol": "diamond"}),
    ]
    solid = len(names) == 3
    figure = go.Figure()
    for name, members, size, marker in groups:
        if members:
            values = _coordinates(members, names, scales)
            text = [_hover(point, marks.get(point["trial"], []), scales) for point in members]
            kind = go.Scatter3d if solid else go.Scatter
            figure.add_trace(
                kind(
                    name=name,
                    mode="markers",
                    marker={**marker, "size": size / 2 if solid else size},
                    text=text,
                    hovertemplate="%{text}<extra></extra>",
                    **values,
                )
            )
    titles = {axis: _title(name, scales[name], short=solid) for axis, name in zip("xyz", names, strict=False)}
    axes = {f"{axis}axis": {"title": {"text": text}} for axis, text in titles.items()}
    heading = f"Front: {' against '.join(METRICS[name].label for name in names)}"
    figure.update_layout(
        title={"text": heading, "font": {"size": 15}},
        height=HEIGHT_PX,
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom"},
        margin={"l": 0, "r": 0, "t": 70, "b": 0} if solid else {"l": 60, "r": 20, "t": 70, "b": 48},
        **({"scene": axes} if solid else axes),
    )
    return figure


def _title(name: str, scale: units.Scale, *, short: bool) -> str:
    better = "" if short else f", {'less' if METRICS[name].direction == 'minimize' else 'more'} is better"
    return f"{METRICS[name].label} ({scale.unit}){better}"


def _coordinates(points: Sequence[Data], names: Sequence[str], scales: dict[str, units.Scale]) -> dict[str, Any]:
    """The arguments of a trace: values and error bars for each axis."""
    found: dict[str, Any] = {}
    for axis, name in zip("xyz", names, strict=False):
        values = [measured(point)[name] for point in points]
        ends = [interval(point, name, value) for point, value in zip(points, values, strict=True)]
        factor = scales[name].factor
        found[axis] = [value / factor for value in values]
        found[f"error_{axis}"] = {
            "type": "data", "symmetric": False, "thickness": 1, "width": 3,
            "array": [(high - value) / factor for value, (_, high) in zip(values, ends, strict=True)],
            "arrayminus": [(value - low) / factor for value, (low, _) in zip(values, ends, strict=True)],
        }  # fmt: skip
    return found


def _hover(point: Data, marks: Sequence[str], scales: dict[str, units.Scale]) -> str:
    """What is shown at a point; plotly reads tags in it, so whatever is not ours is escaped."""
    head = f"<b>trial {point['trial']}</b>{', ' + ', '.join(marks) if marks else ''}"
    values = [f"{METRICS[name].label}: {scale.quantity(measured(point)[name])}" for name, scale in scales.items()]
    return "<br>".join([head, escape(words(point["candidate"])), *values])
