"""Plotly figures of a study as plain JSON, the same in page, dashboard, PNG and notebook (`go.Figure(figure)`).

They are no plotly objects: validating those takes as long as all other work for a page of 1,000 trials.
Colours can be read on a light and on a dark ground. All traces are scatter or bar: they need no WebGL.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, TypeAlias

from autotune.report import series
from autotune.report.data import Data, StudyReport, metric_scale
from autotune.report.series import level_text, rounded
from autotune.report.timeline import LANES, Run
from autotune.scoring.metrics import METRICS
from autotune.system.units import Scale
from autotune.trial import lengths as lengths_of

Figure: TypeAlias = dict[str, Any]
Trace: TypeAlias = dict[str, Any]

GREY, BLUE, ORANGE, RED = "#8b9098", "#3b76e8", "#e08a2e", "#d0405a"
CYCLE = (BLUE, "#0f9b88", ORANGE, "#9a6bd6", RED, GREY)
# An axis is logarithmic where the values span more than this factor: most trials would crowd into a corner otherwise.
LOG_FROM = 10.0
MOST_EFFECTS = 8
LEAST_EXPLAINED = 0.1  # share of the spread from which on the effects of knobs are shown


def scatter(name: str, x: Sequence[Any], y: Sequence[Any], mode: str = "lines", hover: str = "", **more: Any) -> Trace:
    """A trace; without a hover template it says nothing when the pointer is over it."""
    said = {"hovertemplate": f"{hover}<extra></extra>"} if hover else {"hoverinfo": "skip"}
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": y, **said, **more}


def figure(traces: Sequence[Trace], xaxis: Data, yaxis: Data) -> Figure:
    """A figure of the traces that hold something."""
    return {"data": [trace for trace in traces if trace["x"]], "layout": {**layout(), "xaxis": xaxis, "yaxis": yaxis}}


def effects(report: StudyReport) -> Figure:
    """The share of each objective's spread that goes with each knob."""
    traces = []
    names = series.effect_names(effect for found in report.effects for effect in found.knobs)
    for i, found in enumerate(report.effects):
        shown = found.knobs[:MOST_EFFECTS]
        levels = (
            "<br>".join(f"{escape(level_text(level.value))}: {level.factor - 1:+.0%}" for level in effect.levels)
            for effect in shown
        )
        bar: Trace = {"type": "bar", "orientation": "h", "name": METRICS[found.metric].label, "hovertext": list(levels)}
        bar |= {"marker": {"color": CYCLE[i % len(CYCLE)]}, "x": [rounded(100 * effect.share) for effect in shown]}
        bar["y"] = [names[effect.knobs] for effect in shown]
        traces += [bar] if found.explained >= LEAST_EXPLAINED else []
    return figure(traces, axis("share of the spread (%)"), {"autorange": "reversed", "automargin": True})


def progress(report: StudyReport, metric: str = "gain", across: str = "time") -> Figure:
    """Each trial at the moment when it ended, and the best so far of those that may be recommended.

    Args:
        metric: An objective, or `gain`: the compromise of all of them over the baseline.
        across: The horizontal axis: `time` (seconds that trials took) or `trial` (their numbers).
    """
    points = series.progress(report)
    seen = [point.metrics[metric] for point in points if metric in point.metrics]
    unit = None if metric == "gain" else metric_scale(metric, seen)
    smaller = unit is not None and METRICS[metric].direction == "minimize"

    def value(point: series.ProgressPoint) -> float | None:
        own = point.gain if unit is None else point.metrics.get(metric)
        return None if own is None else rounded(own / (unit.factor if unit else 1.0))

    def place(point: series.ProgressPoint) -> float:
        return point.ended_s if across == "time" else point.trial

    def markers(name: str, shown: Sequence[series.ProgressPoint], y: Sequence[float], marker: Data) -> Trace:
        texts = [trial_text(report, p.trial, f"<br>{escape(p.outcome)} after {p.ended_s:.0f} s") for p in shown]
        x, hover = [place(p) for p in shown], "%{hovertext}<br>%{y:.4g}"
        return scatter(name, x, y, "markers", hover, marker=marker, hovertext=texts)

    done = [(point, found) for point in points if (found := value(point)) is not None]
    failed = [point for point in points if value(point) is None]
    values = [found for _, found in done]
    sound = [(place(point), found) for point, found in done if point.sound]
    best = list(itertools.accumulate((found for _, found in sound), min if smaller else max))
    ends = [at for at, _ in sound] + [place(points[-1])] if sound else []
    cross = {"size": 8, "symbol": "x-thin", "color": GREY, "line": {"width": 1.5, "color": GREY}}
    traces = [
        scatter("best so far", ends, [*best, *best[-1:]], line={"color": BLUE, "width": 2, "shape": "hv"}),
        markers("trial", [point for point, _ in done], values, {"size": 7, "color": GREY}),
        markers("does not count", failed, [min(values, default=0.0)] * len(failed), cross),
    ]
    title = "gain over the baseline (×)" if unit is None else metric_label(metric, unit)
    return figure(traces, axis("seconds of trials" if across == "time" else "trial"), axis(title))


def timeline(report: StudyReport) -> Figure:
    """When each trial, its re-measurements and its checks ran, a lane for each kind of run."""
    traces = []
    for i, lane in enumerate(dict.fromkeys(LANES.values())):
        shown = [run for run in report.runs if run.lane == lane]
        texts = [_run_text(report, run) for run in shown]
        bar: Trace = {"type": "bar", "orientation": "h", "name": lane, "hovertext": texts, "showlegend": False}
        bar |= {"hovertemplate": "%{hovertext}<extra></extra>", "marker": {"color": CYCLE[i % len(CYCLE)]}}
        bar |= {"base": [round(run.began_s, 2) for run in shown], "x": [round(run.wall_s, 2) for run in shown]}
        traces.append(bar | {"y": [f"{lane} ({len(shown)})"] * len(shown)})
    lanes = {"autorange": "reversed", "automargin": True, "dtick": 1}  # a low plot would name every second lane
    found = figure(traces, axis("seconds since the first run"), lanes)
    found["layout"] |= {"barmode": "overlay", "bargap": 0.35}
    return found


def _run_text(report: StudyReport, run: Run) -> str:
    what = f"<b>{escape(run.lane)}</b>, {escape(run.name)}<br>{run.wall_s:.1f} s, from {run.began_s:.0f} s on"
    return f"{trial_text(report, run.trial)}<br>{what}" if run.trial in report.configurations else what


def losses(report: StudyReport, across: str = "samples", *, difference: bool = False) -> Figure:
    """The loss curves over `samples`, `seconds` or `steps`; picks and baseline are named.

    Args:
        difference: Draw each curve's distance from the baseline's, as far as both reach.
    """
    curves, n_named, traces = series.losses(report), 0, []
    base = next((curve for curve in curves if "baseline" in curve.marks), None)
    for curve in curves:
        named, is_base, best = bool(curve.marks), curve is base, "recommended" in curve.marks
        n_named += named and not is_base and not best
        color = BLUE if best else RED if is_base else CYCLE[1 + n_named % 3] if named else GREY
        width, dash = 3 if best else 2 if named else 1, "dash" if is_base and not best else "solid"
        name, hover = ", ".join(curve.marks) or "others", f"{trial_text(report, curve.trial)}<br>loss %{{y:.4g}}"
        style: Trace = {"line": {"color": color, "width": width, "dash": dash}, "legendgroup": name}
        y = series.above(curve, base, across) if difference and base else curve.loss
        traces.append(scatter(name, curve.across[across], y, hover=hover, opacity=1.0 if named else 0.35, **style))
    traces.sort(key=lambda trace: trace["line"]["width"])  # the named ones are drawn last, on top
    for i, trace in enumerate(traces):
        trace["showlegend"] = trace["name"] not in {other["name"] for other in traces[:i]}
    reached = [x for trace in traces for x in trace["x"]]
    title = {"samples": "samples trained on", "seconds": "seconds of training", "steps": "optimizer steps"}[across]
    up = "training loss minus the baseline's" if difference and base else "training loss"
    return figure(traces, axis(title, reached, log=spans_decade(reached)), axis(up))


def gate(report: StudyReport, trial: Data, *, difference: bool = False) -> Figure:
    """The losses of a trial with other numerics beside those of its reference, as the quality gate compared them.

    Args:
        difference: Draw the distance from the reference's losses.
    """
    found, name = trial["gate"], f"trial {trial['trial']}"
    losses, alike = trial["losses"], found.get("same_as")
    if alike is not None:  # the curve of another trial was compared: its own is one at another batch
        losses = next((other["losses"] for other in report.trials if other["trial"] == alike), [])
        name = f"trial {alike}, whose numerics are the same"
    n = found["n_steps"] or len(losses)  # its own curve may be longer than what was compared
    reference, own = series.pieces_of(found["losses"]), series.pieces_of(losses[:n])
    replicates = [series.pieces_of(each) for each in found["replicates"]]

    def line(name: str, curve: Sequence[float | None], first: bool = True, **style: Any) -> Trace:
        pairs = zip(curve, reference, strict=False)
        away = [None if a is None or b is None else rounded(a - b) for a, b in pairs]
        y = away if difference else list(curve)
        x = [1 + i * series.piece_size(n) for i in range(len(y))]
        return scatter(
            name, x, y, hover=f"{name}<br>step %{{x}}: %{{y:.4g}}", line=style, legendgroup=name, showlegend=first
        )

    again = "the reference again"
    traces = [line(again, each, i == 0, color=GREY, width=1) for i, each in enumerate(replicates)]
    traces.append(line("reference: the baseline's numerics", reference, color=RED, width=2, dash="dash"))
    traces.append(line(name, own, color=BLUE, width=2))
    return figure(traces, axis("optimizer step"), axis(f"training loss{' minus the reference' if difference else ''}"))


def steps(report: StudyReport, trials: Iterable[int]) -> Figure:
    """The time of every step of some trials, warm-up dotted; a band reaches to the longest step of each piece."""
    curves = {curve.trial: curve for curve in series.steps(report)}
    found = [curves[trial] for trial in dict.fromkeys(trials) if trial in curves]
    traces = [step_traces(report, curve, CYCLE[i % len(CYCLE)]) for i, curve in enumerate(found)]
    return {"data": [trace for three in traces for trace in three], "layout": step_layout()}


def step_layout() -> Data:
    """The layout of a figure of step times."""
    return {**layout(), "xaxis": axis("optimizer step"), "yaxis": axis("step time (ms)")}


def step_traces(report: StudyReport, curve: series.StepCurve, color: str) -> list[Trace]:
    """Three traces for one trial: its longest steps; all pieces, dotted and filled up to them; the counted pieces."""
    x = [n * curve.size + (min(curve.size, curve.n - n * curve.size) + 1) / 2 for n in range(len(curve.median_ms))]
    counted = next((i for i, step in enumerate(x) if step > curve.n_warmup), len(x))
    name = f"trial {curve.trial}{': ' + ', '.join(curve.marks) if curve.marks else ''}"
    hover = f"{trial_text(report, curve.trial)}<br>step %{{x:.0f}}: %{{y:.4g}} ms"
    line, common = {"color": color, "width": 1.6}, Trace(legendgroup=str(curve.trial))
    hidden: Trace = common | {"showlegend": False}
    return [
        scatter(name, x, curve.longest_ms, line={"color": color, "width": 0}, **hidden),
        scatter(name, x, curve.median_ms, line=line | {"dash": "dot"}, fill="tonexty", **hidden),
        scatter(name, x[counted:], curve.median_ms[counted:], hover=hover, line=line, **common),
    ]


def lengths(report: StudyReport) -> Figure:
    """The share of the data set's samples by length."""
    shares = lengths_of.shares(report.workload["data"]["table"])
    bar: Trace = {"type": "bar", "name": "samples", "x": [f"to {each:,}" for each in shares]}
    bar |= {"y": [rounded(100 * share) for share in shares.values()], "marker": {"color": BLUE}}
    bar["hovertemplate"] = "%{y:.3g} %<extra></extra>"
    return figure([bar], axis("length of a sample") | {"type": "category"}, axis("share of the samples (%)"))


def forecasts(report: StudyReport, metric: str) -> Figure:
    """Measured against forecast with 90 % intervals; on the dashed line the forecast was right."""
    points = series.forecasts(report).get(metric, [])
    unit = metric_scale(metric, [point.measured for point in points])

    x, y = (
        [rounded(value / unit.factor) for value in each]
        for each in ([p.value for p in points], [p.measured for p in points])
    )
    ends = [*x, *y] or [1.0]
    log, diagonal = spans_decade(ends), [0.9 * min(ends), 1.1 * max(ends)]
    bars = error_bars([(p.value, p.low, p.high) for p in points], unit.factor)
    hover = "%{hovertext}<br>forecast %{x:.4g}, measured %{y:.4g}"
    style = {"marker": {"size": 8, "color": BLUE}, "hovertext": [trial_text(report, p.trial) for p in points]}
    traces = [
        scatter("forecast was right", diagonal, diagonal, line={"color": GREY, "width": 1.5, "dash": "dash"}),
        scatter("trial", x, y, "markers", hover, error_x=bars, **style),
    ]
    label = f"{METRICS[metric].label} ({unit.unit})"
    return figure(traces, axis(f"forecast {label}", ends, log=log), axis(f"measured {label}", ends, log=log))


def metric_label(metric: str, unit: Scale) -> str:
    """The title of a metric's axis."""
    better = "less" if METRICS[metric].direction == "minimize" else "more"
    return f"{METRICS[metric].label} ({unit.unit}), {better} is better"


def trial_text(report: StudyReport, trial: int, more: str = "") -> str:
    """The first lines of a hover text; plotly reads tags in it, so names and configurations are escaped."""
    marks = escape(", ".join(report.marks.get(trial, ())))
    return f"<b>trial {trial}</b>{', ' + marks if marks else ''}<br>{escape(report.configurations[trial])}{more}"


def layout() -> dict[str, Any]:
    """The layout of every figure, without axes."""
    return {
        "hovermode": "closest",
        "margin": {"l": 76, "r": 22, "t": 24, "b": 60},
        "legend": {"orientation": "h", "y": -0.24, "yanchor": "top"},
    }


def axis(title: str, values: Sequence[float] = (), *, log: bool = False) -> dict[str, Any]:
    """An axis; on a logarithmic one plotly would abbreviate 200 to 2, so the ticks are written out.

    Not those of values within a factor of 2: no round number may lie among them, and plotly then shows all digits.
    """
    found: dict[str, Any] = {
        "title": {"text": title, "standoff": 10, "font": {"size": 13}},
        "zeroline": False,
        "exponentformat": "none",
        "automargin": True,
    }
    positive = [value for value in values if value > 0]
    low, high = min(positive, default=1.0), max(positive, default=1.0)
    if high > 2 * low:
        steps = (1, 2, 5) if high > 8 * low else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
        powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
        ticks = [step * 10.0**power for power in powers for step in steps if low / 2 <= step * 10.0**power <= high * 2]
        found |= {
            "tickvals": ticks,
            "ticktext": [f"{tick:,.6g}" for tick in ticks],
            "tickmode": "array" if log else "auto",
        }
    return found | {"type": "log" if log else "linear"}


def error_bars(points: Sequence[tuple[float, float, float]], factor: float) -> dict[str, Any]:
    """Bars from the lower to the upper end of each value's interval; `points` are value, low, high, and are divided."""
    above = [rounded((high - value) / factor) for value, _, high in points]
    below = [rounded((value - low) / factor) for value, low, _ in points]
    return {"type": "data", "symmetric": False, "thickness": 1, "width": 3, "array": above, "arrayminus": below}


def spans_decade(values: Sequence[float]) -> bool:
    """Returns whether a logarithmic axis suits the values."""
    return bool(values) and min(values) > 0 and max(values) > LOG_FROM * min(values)
