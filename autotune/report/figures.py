"""The front as plotly figures, for Optuna's dashboard; the page of `report.html` draws its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import combinations
from typing import Any

from autotune.objective import METRICS
from autotune.report import Data, StudyReport, interval, measured, units, words

# They read on a light ground and on a dark one: the dashboard has both.
TRIED, FRONT, PICK, BASELINE = "#8b9098", "#3b76e8", "#e08a2e", "#d0405a"
HEIGHT_PX = 460
MOST_OBJECTIVES = 4


def front(report: StudyReport) -> dict[str, Data]:
    """The front over each two of the objectives; by an id, as data and layout.

    No plotly objects: they look at every number, which for 1,000 trials takes as long as everything else that a page needs.

    Bars are 95 % intervals; the baseline and the picks are marked. In three dimensions plotly draws with WebGL, which machines that
    people reach over ssh or a remote desktop often do not have.
    """
    names = report.metric_names(all_metrics=False)
    if len(names) < 2:
        names = report.metric_names()[:2]
    if len(names) < 2 or not report.points():
        return {}
    names, marks = names[:MOST_OBJECTIVES], report.marks()
    values = {number: measured(point) for number, point in report.points().items()}
    scales = {name: units.scale(name, [found[name] for found in values.values() if name in found]) for name in names}
    # Once, not for each of the figures: of 1,000 trials that would be half the time of a page.
    texts = {
        number: _hover(point, values[number], marks.get(number, []), scales)
        for number, point in report.points().items()
    }
    return {
        f"autotune-front-{n}": _figure(report, {name: scales[name] for name in pair}, values, texts, marks)
        for n, pair in enumerate(combinations(names, 2), start=1)
    }


def _figure(
    report: StudyReport,
    scales: Mapping[str, units.Scale],
    values: Mapping[int, Mapping[str, float]],
    texts: Mapping[int, str],
    marks: Mapping[int, Sequence[str]],
) -> Data:
    on_front = {point["trial"] for point in report.front}
    points = [point for number, point in report.points().items() if all(name in values[number] for name in scales)]
    named = {number for number, found in marks.items() if found != ["baseline"]}
    base = {number for number, found in marks.items() if "baseline" in found}
    groups = [
        ("tried", [p for p in points if p["trial"] not in on_front | named | base], 7, {"color": TRIED}),
        ("front", [p for p in points if p["trial"] in on_front - named - base], 9, {"color": FRONT}),
        ("pick", [p for p in points if p["trial"] in named - base], 13, {"color": PICK}),
        ("baseline", [p for p in points if p["trial"] in base], 13, {"color": BASELINE, "symbol": "diamond"}),
    ]
    traces = [
        {
            "type": "scatter",
            "name": name,
            "mode": "markers",
            "marker": {**marker, "size": size},
            "text": [texts[point["trial"]] for point in members],
            "hovertemplate": "%{text}<extra></extra>",
            **_coordinates(members, values, scales),
        }
        for name, members, size, marker in groups
        if members
    ]
    axes = {
        f"{axis}axis": {"title": {"text": _title(name, scale)}}
        for axis, (name, scale) in zip("xy", scales.items(), strict=True)
    }
    heading = f"Front: {' against '.join(METRICS[name].label for name in scales)}"
    layout = {
        # Below the buttons that plotly puts at the top, and clear of the legend, also where a narrow screen breaks that.
        "title": {"text": heading, "font": {"size": 13}, "x": 0.02, "y": 1 - 34 / HEIGHT_PX, "yanchor": "top"},
        "height": HEIGHT_PX,
        "legend": {"orientation": "h", "y": -0.24, "yanchor": "top"},
        "margin": {"l": 76, "r": 20, "t": 64, "b": 120},
        **axes,
    }
    return {"data": traces, "layout": layout}


def _title(name: str, scale: units.Scale) -> str:
    return f"{METRICS[name].label} ({scale.unit}),<br>{'less' if METRICS[name].direction == 'minimize' else 'more'} is better"


def _coordinates(
    points: Sequence[Data], values: Mapping[int, Mapping[str, float]], scales: Mapping[str, units.Scale]
) -> dict[str, Any]:
    """The arguments of a trace: values and error bars for each axis."""
    found: dict[str, Any] = {}
    for axis, (name, scale) in zip("xy", scales.items(), strict=True):
        own = [values[point["trial"]][name] for point in points]
        ends = [interval(point, name, value) for point, value in zip(points, own, strict=True)]
        found[axis] = [value / scale.factor for value in own]
        found[f"error_{axis}"] = {
            "type": "data", "symmetric": False, "thickness": 1, "width": 3,
            "array": [(high - value) / scale.factor for value, (_, high) in zip(own, ends, strict=True)],
            "arrayminus": [(value - low) / scale.factor for value, (low, _) in zip(own, ends, strict=True)],
        }  # fmt: skip
    return found


def _hover(point: Data, values: Mapping[str, float], marks: Sequence[str], scales: Mapping[str, units.Scale]) -> str:
    """What is shown at a point; plotly reads tags in it, so whatever is not ours is escaped."""
    head = f"<b>trial {point['trial']}</b>{', ' + ', '.join(marks) if marks else ''}"
    said = [
        f"{METRICS[name].label}: {scale.quantity(values[name])}" for name, scale in scales.items() if name in values
    ]
    return "<br>".join([head, escape(words(point["candidate"])), *said])
