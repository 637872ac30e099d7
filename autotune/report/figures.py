"""Plotly figures of a study as plain JSON, the same in page, dashboard, PNG and notebook (`go.Figure(figure)`).

They are no plotly objects: validating those takes as long as all other work for a page of 1,000 trials.
Colours can be read on a light and on a dark ground. All traces are scatter or bar: they need no WebGL.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, TypeAlias

from autotune.report import series
from autotune.report.data import Data, StudyReport, metric_scale, words
from autotune.report.series import level_text, rounded
from autotune.scoring.metrics import METRICS
from autotune.system.units import Scale

Figure: TypeAlias = dict[str, Any]
Trace: TypeAlias = dict[str, Any]

GREY, BLUE, ORANGE, RED = "#8b9098", "#3b76e8", "#e08a2e", "#d0405a"
CYCLE = (BLUE, "#0f9b88", ORANGE, "#9a6bd6", RED, GREY)
# An axis is logarithmic where the values span more than this factor: most trials would crowd into a corner otherwise.
LOG_FROM = 10.0
MOST_EFFECTS = 8


def effects(report: StudyReport) -> Figure:
    """The share of each objective's spread that goes with each knob."""
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": METRICS[found.metric].label,
            "marker": {"color": CYCLE[i % len(CYCLE)]},
            "x": [rounded(100 * effect.share) for effect in found.knobs[:MOST_EFFECTS]],
            "y": [effect.knob.rsplit(".", 1)[-1] for effect in found.knobs[:MOST_EFFECTS]],
            "hovertext": [
                "<br>".join(f"{escape(level_text(level.value))}: {level.factor - 1:+.0%}" for level in effect.levels)
                for effect in found.knobs[:MOST_EFFECTS]
            ],
        }
        for i, found in enumerate(report.effects)
        if found.explained >= 0.1
    ]
    yaxis = {"autorange": "reversed", "automargin": True}
    return {
        "data": traces,
        "layout": {**layout(), "xaxis": axis("share of the spread (%)"), "yaxis": yaxis, "hovermode": "closest"},
    }


def progress(
    report: StudyReport,
    metric: str = "gain",
    across: str = "time",
    points: Sequence[series.ProgressPoint] | None = None,
) -> Figure:
    """Each trial when it ended, and the best so far.

    Args:
        report: The study.
        metric: An objective, or `gain`: the compromise of all of them over the baseline.
        across: `time` (seconds that trials took) or `trial`.
        points: `series.progress` of the report, where several figures are made of it.
    """
    points = points or series.progress(report)
    unit = (
        None if metric == "gain" else metric_scale(metric, [p.metrics[metric] for p in points if metric in p.metrics])
    )
    smaller = unit is not None and METRICS[metric].direction == "minimize"
    text = {trial["trial"]: words(trial["candidate"]) for trial in report.trials}

    def value(point: series.ProgressPoint) -> float | None:
        own = point.gain if unit is None else point.metrics.get(metric)
        return None if own is None else rounded(own / (unit.factor if unit else 1.0))

    def markers(name: str, shown: Sequence[series.ProgressPoint], y: Sequence[float], marker: Data) -> Trace:
        hover = [
            f"{trial_text(p.trial, '', text[p.trial])}<br>{escape(p.outcome)} after {p.ended_s:.0f} s" for p in shown
        ]
        return {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [place(p) for p in shown],
            "y": y,
            "marker": marker,
            "hovertext": hover,
            "hovertemplate": "%{hovertext}<br>%{y:.4g}<extra></extra>",
        }

    def place(point: series.ProgressPoint) -> float:
        return point.ended_s if across == "time" else point.trial

    done = [(point, found) for point in points if (found := value(point)) is not None]
    failed = [point for point in points if value(point) is None]
    best: list[float] = []
    for _, found in done:
        best.append(found if not best else (min if smaller else max)(best[-1], found))
    line = _best_line([place(point) for point, _ in done] + [place(points[-1])], [*best, *best[-1:]])
    foot = min((found for _, found in done), default=0.0)
    cross = {"size": 8, "symbol": "x-thin", "color": GREY, "line": {"width": 1.5, "color": GREY}}
    traces = [
        line,
        markers("trial", [point for point, _ in done], [found for _, found in done], {"size": 7, "color": GREY}),
        markers("no measurement", failed, [foot] * len(failed), cross),
    ]
    title = "gain over the baseline (×)" if unit is None else metric_label(metric, unit)
    axes = {"xaxis": axis("seconds of trials" if across == "time" else "trial"), "yaxis": axis(title)}
    return {"data": [trace for trace in traces if trace["x"]], "layout": {**layout(), **axes}}


def _best_line(x: Sequence[float], y: Sequence[float]) -> Trace:
    """The best value so far, up to the last trial; empty if nothing was measured."""
    style = {"color": BLUE, "width": 2, "shape": "hv"}
    common = {"type": "scatter", "mode": "lines", "name": "best so far", "hoverinfo": "skip", "line": style}
    return {**common, "x": x if y else [], "y": y}


def losses(report: StudyReport, across: str = "samples") -> Figure:
    """The loss curves over `samples`, `seconds` or `steps`; picks and baseline are named."""
    text = {trial["trial"]: words(trial["candidate"]) for trial in report.trials}
    traces, n_named = [], 0
    for curve in series.losses(report):
        named, base, best = bool(curve.marks), "baseline" in curve.marks, "recommended" in curve.marks
        n_named += named and not base and not best
        color = BLUE if best else RED if base else CYCLE[1 + n_named % 3] if named else GREY
        name = ", ".join(curve.marks) or "others"
        trace: Trace = {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "legendgroup": name,
            "opacity": 1.0 if named else 0.35,
            "x": curve.across[across],
            "y": curve.loss,
            "line": {
                "color": color,
                "width": 3 if best else 2 if named else 1,
                "dash": "dash" if base and not best else "solid",
            },
            "hovertemplate": f"{trial_text(curve.trial, name if named else '', text[curve.trial])}<br>loss"
            " %{{y:.4g}}<extra></extra>",
        }
        traces.append(trace)
    traces.sort(key=lambda trace: trace["line"]["width"])  # the named ones are drawn last, on top
    for i, trace in enumerate(traces):
        trace["showlegend"] = trace["name"] not in {other["name"] for other in traces[:i]}
    title = {"samples": "samples trained on", "seconds": "seconds of training", "steps": "optimizer steps"}[across]
    return {"data": traces, "layout": {**layout(), "xaxis": axis(title), "yaxis": axis("training loss")}}


def steps(report: StudyReport, trials: Iterable[int]) -> Figure:
    """The time of every step of some trials, warm-up dotted; a band reaches to the longest step of each piece."""
    curves = {curve.trial: curve for curve in series.steps(report)}
    found = [curves[trial] for trial in dict.fromkeys(trials) if trial in curves]
    text = {trial["trial"]: words(trial["candidate"]) for trial in report.trials}
    traces = [
        trace for i, curve in enumerate(found) for trace in step_traces(curve, text[curve.trial], CYCLE[i % len(CYCLE)])
    ]
    return {"data": traces, "layout": step_layout()}


def step_layout() -> Data:
    """The layout of a figure of step times."""
    return {**layout(), "xaxis": axis("optimizer step"), "yaxis": axis("step time (ms)")}


def step_traces(curve: series.StepCurve, configuration: str, color: str) -> list[Trace]:
    """Three traces for one trial: its longest steps; all pieces, dotted and filled up to them; the counted pieces."""
    middle = [n * curve.size + (min(curve.size, curve.n - n * curve.size) + 1) / 2 for n in range(len(curve.median_ms))]
    counted = next((i for i, step in enumerate(middle) if step > curve.n_warmup), len(middle))
    marks = ", ".join(curve.marks)
    hover = f"{trial_text(curve.trial, marks, configuration)}<br>step %{{x:.0f}}: %{{y:.4g}} ms<extra></extra>"
    name = f"trial {curve.trial}{': ' + marks if marks else ''}"
    common = {"type": "scatter", "mode": "lines", "legendgroup": str(curve.trial), "name": name}
    faint = {"color": color, "width": 0}
    return [
        {**common, "showlegend": False, "hoverinfo": "skip", "line": faint, "x": middle, "y": curve.longest_ms},
        {
            **common,
            "showlegend": False,
            "hoverinfo": "skip",
            "line": {"color": color, "width": 1.6, "dash": "dot"},
            "fill": "tonexty",
            "x": middle,
            "y": curve.median_ms,
        },
        {
            **common,
            "hovertemplate": hover,
            "line": {"color": color, "width": 1.6},
            "x": middle[counted:],
            "y": curve.median_ms[counted:],
        },
    ]


def forecasts(report: StudyReport, metric: str) -> Figure:
    """Measured against forecast with 90 % intervals; on the dashed line the forecast was right."""
    points = series.forecasts(report).get(metric, [])
    unit = metric_scale(metric, [point.measured for point in points])
    text = {trial["trial"]: words(trial["candidate"]) for trial in report.trials}
    said, was = (
        [rounded(v / unit.factor) for v in vs] for vs in ([p.value for p in points], [p.measured for p in points])
    )
    ends = [*said, *was] or [1.0]
    log = spans_decade(ends)
    diagonal = [0.9 * min(ends), 1.1 * max(ends)]
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "forecast was right",
            "hoverinfo": "skip",
            "x": diagonal,
            "y": diagonal,
            "line": {"color": GREY, "width": 1.5, "dash": "dash"},
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": "trial",
            "x": said,
            "y": was,
            "marker": {"size": 8, "color": BLUE},
            "error_x": error_bars(
                [rounded((p.high - p.value) / unit.factor) for p in points],
                [rounded((p.value - p.low) / unit.factor) for p in points],
            ),
            "hovertext": [trial_text(p.trial, "", text[p.trial]) for p in points],
            "hovertemplate": "%{hovertext}<br>forecast %{x:.4g}, measured %{y:.4g}<extra></extra>",
        },
    ]
    label = f"{METRICS[metric].label} ({unit.unit})"
    axes = {"xaxis": axis(f"forecast {label}", ends, log=log), "yaxis": axis(f"measured {label}", ends, log=log)}
    return {"data": traces, "layout": {**layout(), **axes}}


def metric_label(metric: str, unit: Scale) -> str:
    """The title of a metric's axis."""
    better = "less" if METRICS[metric].direction == "minimize" else "more"
    return f"{METRICS[metric].label} ({unit.unit}), {better} is better"


def trial_text(trial: int, marks: str, configuration: str) -> str:
    """The first lines of a hover text; plotly reads tags in it, so everything that is not ours is escaped."""
    return f"<b>trial {trial}</b>{', ' + escape(marks) if marks else ''}<br>{escape(configuration)}"


def layout() -> dict[str, Any]:
    """The layout of every figure, without axes."""
    return {
        "hovermode": "closest",
        "margin": {"l": 76, "r": 22, "t": 24, "b": 60},
        "legend": {"orientation": "h", "y": -0.24, "yanchor": "top"},
    }


def axis(title: str, values: Sequence[float] = (), *, log: bool = False) -> dict[str, Any]:
    """An axis; on a logarithmic one plotly would abbreviate 200 to 2, so the ticks are written out."""
    found: dict[str, Any] = {
        "title": {"text": title, "standoff": 10, "font": {"size": 13}},
        "zeroline": False,
        "exponentformat": "none",
        "automargin": True,
    }
    positive = [value for value in values if value > 0]
    if positive:
        low, high = min(positive), max(positive)
        steps = (1, 2, 5) if high > 8 * low else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
        powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
        ticks = [step * 10.0**power for power in powers for step in steps if low / 2 <= step * 10.0**power <= high * 2]
        found |= {
            "tickvals": ticks,
            "ticktext": [f"{tick:,.6g}" for tick in ticks],
            "tickmode": "array" if log else "auto",
        }
    return found | {"type": "log" if log else "linear"}


def error_bars(above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    """Bars of these lengths above and below the values."""
    return {"type": "data", "symmetric": False, "thickness": 1, "width": 3, "array": above, "arrayminus": below}


def spans_decade(values: Sequence[float]) -> bool:
    """Returns whether a logarithmic axis suits the values."""
    return bool(values) and min(values) > 0 and max(values) > LOG_FROM * min(values)
