"""The sections of the page that its script draws: front, knobs, search, steps, losses, forecasts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.analysis.effects import Effect, Effects
from autotune.objective import METRICS
from autotune.report import StudyReport
from autotune.report.elements import Html, breakable, choice, controls, each, el, group, plot, section
from autotune.report.plots import knobs, said

# Knobs that hardly matter, and values of a knob, beyond these are left to the JSON.
MOST_KNOBS, MOST_LEVELS = 8, 6


def front(report: StudyReport) -> Html:
    """The front over two metrics to choose, and over three."""
    metrics = _labels(report.metric_names())
    if not report.points() or len(metrics) < 2:
        return section("Front", "front", "Fewer than two metrics were measured, so there is nothing to plot.")
    note = (
        "Filled points are the study’s front: no other trial beats them on every objective."
        " The dotted line is the front of the two axes alone. Bars are 95 % intervals."
    )
    return section(
        "Front",
        "front",
        note,
        controls(
            choice("Across", "front-x", metrics, chosen="0"),
            choice("Up", "front-y", metrics, chosen="1"),
            el("label", el("input", type="checkbox", id="front-log"), " logarithmic", class_="check"),
        ),
        el("div", class_="legend", id="front-legend"),
        plot("front-plot", "The trials by two metrics; the table below holds the same numbers", low=False),
        _solid(metrics) if len(metrics) > 2 else None,
    )


def _solid(metrics: Mapping[str, str]) -> Html:
    axes = (("Across", "solid-x", "0"), ("Deep", "solid-y", "1"), ("Up", "solid-z", "2"))
    return group(
        el("h3", "In three dimensions"),
        controls(each(choice(label, name, metrics, chosen=chosen) for label, name, chosen in axes)),
        el(
            "div",
            el(
                "canvas",
                id="solid",
                tabindex=0,
                role="img",
                aria_label="The trials by three metrics; drag or use the arrow keys to turn",
            ),
            el("p", class_="tip", hidden=True),
            class_="plot",
            id="solid-plot",
        ),
        el(
            "p",
            "Drag it or use the arrow keys to turn it; each stem stands on the floor below its point.",
            class_="note",
        ),
    )


def _labels(metrics: Sequence[str]) -> dict[str, str]:
    """Metrics to choose from, by their place among those that the page's script knows."""
    return {str(i): METRICS[metric].label for i, metric in enumerate(metrics)}


def knob(report: StudyReport) -> Html | None:
    """Every trial as a line through its knobs, and what each knob is worth."""
    if len(report.points()) < 2:
        return None
    metrics = _labels(report.metric_names())
    note = (
        "Each line is a trial, coloured by a metric. Choose a value on an axis, or from the lists below it, to see only its trials;"
        " choose it again to let go."
    )
    return section(
        "Knobs",
        "knobs",
        note,
        controls(choice("Colour", "parallel-metric", metrics, chosen=str(min(1, len(metrics) - 1)))),
        el(
            "div",
            el(
                "div",
                el("canvas", id="parallel", role="img", aria_label="Trials by knob; the table holds the same"),
                class_="wide",
            ),
            class_="plot low sideways",
            id="parallel-plot",
            tabindex=0,
        ),
        _lists(report),
        _effects(report.effects) if report.effects else None,
    )


def _lists(report: StudyReport) -> Html:
    """The values on the axes as lists, for whoever has no pointer."""
    lists = (
        choice(
            name.rsplit(".", 1)[-1], f"axis-{i}", {"": "any"} | {str(n): said(level) for n, level in enumerate(levels)}
        )
        for i, (name, levels) in enumerate(knobs(report).items())
    )
    left = el("p", class_="note", id="parallel-said", role="status")
    return group(el("details", el("summary", "Choose values from lists"), controls(each(lists)), class_="lists"), left)


def _effects(mattered: Sequence[Effects]) -> Html:
    note = (
        "How much of a metric’s spread over the trials goes with each knob, and what its values change beside the baseline’s"
        " (named first), all else equal: a sum of one term for each knob, fitted to the logarithm of what was measured."
    )
    return group(
        el("h3", "What mattered"),
        el("p", note, class_="note"),
        el("div", each(map(_effect_card, mattered)), class_="effects", id="effects-plot"),
    )


def _effect_card(found: Effects) -> Html:
    label = METRICS[found.metric].label
    if found.explained < 0.1:
        said_ = f"{found.n} trials do not tell: what the knobs are worth in some of them does not hold in the others."
        return el("article", el("h3", label), el("p", said_, class_="muted"), class_="card")
    note = f"{found.n} trials; {found.explained:.0%} of the spread of trials left out is foretold. The rest is chance or interplay."
    shown = [effect for effect in found.knobs if effect.share >= 0.01][:MOST_KNOBS]
    return el(
        "article",
        el("h3", label),
        el("p", note, class_="muted"),
        each(_effect(found.metric, effect) for effect in shown),
        class_="card",
    )


def _effect(metric: str, effect: Effect) -> Html:
    smaller = METRICS[metric].direction == "minimize"
    reference, *others = effect.levels
    others = sorted(others, key=lambda level: level.factor if smaller else -level.factor)[:MOST_LEVELS]
    worth = [
        f"{said(level.value)} {f'{level.factor - 1:+.0%}'.replace('-0%', '±0%').replace('+0%', '±0%')}"
        for level in others
    ]
    return el(
        "div",
        el("p", el("b", breakable(effect.knob.rsplit(".", 1)[-1])), el("span", f"{effect.share:.0%}"), class_="of"),
        el("div", el("i", style=f"width:{min(100.0, 100 * effect.share):.1f}%"), class_="share", aria_hidden="true"),
        el("p", f"{said(reference.value)}: ", ", ".join(worth), class_="muted"),
        class_="effect",
    )


def progress(report: StudyReport) -> Html | None:
    """How the search progressed."""
    if len(report.trials) < 2:
        return None
    measures = {"gain": "compromise of the objectives"} if report.baseline is not None else {}
    measures |= {name: METRICS[name].label for name in report.metric_names(all_metrics=False)}
    note = "Each trial at the time when it ended, and the best so far. Time is that of the trials alone; crosses ended without a measurement."
    return section(
        "Search",
        "progress",
        note,
        controls(
            choice("Up", "progress-y", measures), choice("Across", "progress-x", {"at": "time", "trial": "trials"})
        ),
        plot("progress-plot", "The best configuration so far over time"),
    )


def forecast(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> Html:
    """What was forecast against what was measured."""
    notes = [_forecast_note(name, points) for name, points in found.items()]
    return section(
        "Forecasts",
        "forecasts",
        "Before each trial the ones before it led to expect this; bars are 90 % intervals, on the line the forecast was right.",
        el("ul", each(el("li", note) for note in notes), class_="plain note"),
        controls(choice("Metric", "forecast-metric", {name: METRICS[name].label for name in found})),
        plot("forecast-plot", "Measured against forecast"),
    )


def _forecast_note(name: str, points: Sequence[Mapping[str, Any]]) -> str:
    errors = [abs(point["was"] / point["said"][0] - 1) for point in points if point["said"][0] > 0]
    held = sum(point["said"][1] <= point["was"] <= point["said"][2] for point in points)
    typical = f"half of the forecasts were within {statistics.median(errors):.0%}; " if errors else ""
    return f"{METRICS[name].label}: {typical}{held} of {len(points)} intervals held what was measured"


def step() -> Html:
    """Step times of chosen trials."""
    note = (
        "The time of each optimizer step of the chosen trials, warm-up included (dotted, and not counted). Long trials are drawn in pieces:"
        " the line is a piece’s median, the band reaches to its longest step."
    )
    return section(
        "Steps",
        "steps",
        note,
        controls(
            el(
                "label", "Trials ", el("input", type="text", id="steps-trials", inputmode="numeric", autocomplete="off")
            ),
            el("label", el("input", type="checkbox", id="steps-log"), " logarithmic", class_="check"),
            el("span", class_="muted", id="steps-said", role="status"),
        ),
        el("div", class_="legend", id="steps-legend"),
        plot("steps-plot", "Step times of the chosen trials"),
    )


def loss() -> Html:
    """Loss curves."""
    note = (
        "Training loss, from the same weights and in the same order of data; each point is the mean over a piece of the curve."
        " Over samples, configurations that learn alike lie on each other; over seconds, the faster one lies to the left."
    )
    return section(
        "Losses",
        "losses",
        note,
        controls(choice("Across", "loss-x", {axis: axis for axis in ("samples", "seconds", "steps")})),
        el("div", class_="legend", id="loss-legend"),
        plot("loss-plot", "Training loss of the trials"),
    )
