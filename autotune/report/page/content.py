"""The report's texts and tables as plain data, for the templates."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from autotune.report import series
from autotune.report.data import (
    PICK_NOTES,
    Data,
    StudyReport,
    differences,
    gain,
    interval,
    measured,
    metric_scale,
    speedup,
    title,
    words,
)
from autotune.report.readme import machine, reproduce, subject
from autotune.report.series import level_text
from autotune.scoring.effects import Effect, Effects
from autotune.scoring.metrics import METRICS
from autotune.system.units import Scale, format_bytes, format_duration

Context = dict[str, Any]
# Fields of the study that the page shows elsewhere or that only programs need.
HIDDEN_FIELDS = ("name", "target", "wall s", "folder", "stored as")
# Cards and rows beyond these are in the JSON only.
MOST_GATE_CARDS, MOST_KNOBS, MOST_LEVELS = 8, 8, 6
# Least widths of the table's columns; the configuration's is the style sheet's, as it depends on the screen.
TRIAL_REM, OUTCOME_REM, SPEEDUP_REM, METRIC_REM, LONG_METRIC_REM, WALL_REM = 4.4, 9.6, 5.6, 6.1, 8.4, 4.4
LONG_LABEL = 20
GATE_WIDTH, GATE_HEIGHT = 360, 150


def page(report: StudyReport, drawn: Mapping[str, Any]) -> Context:
    """Everything that the template of the report shows.

    Args:
        report: The study.
        drawn: The figures by plot and choice.
    """
    labels = {name: METRICS[name].label for name in report.metric_names()}
    n, wall_s = report.study.get("n_trials", len(report.trials)), report.study.get("wall_s")
    took = format_duration(wall_s or 0.0).replace(" ", "\u00a0")
    return {
        "name": report.name,
        "lead": f"{subject(report)} on {machine(report)}. {n} trials{f' in {took}' if wall_s else ''}.",
        "answer": _answer(report),
        "picks": _picks(report),
        "choices": {
            "front": {key: " × ".join(labels[name] for name in key.split("|")) for key in drawn.get("front-plot", ())},
            "parallel": {key: labels[key] for key in drawn.get("parallel", ())},
            "progress": {
                metric: labels.get(metric, "compromise of the objectives")
                for metric in dict.fromkeys(key.split("|")[0] for key in drawn.get("progress-plot", ()))
            },
            "loss": {key: key for key in drawn.get("loss-plot", ())},
            "forecast": {key: labels[key] for key in drawn.get("forecast-plot", ())},
        },
        "knobs": {
            name.rsplit(".", 1)[-1]: [level_text(level) for level in levels]
            for name, levels in series.knobs(report).items()
        },
        "effects": [_effects(found) for found in report.effects],
        "table": _table(report),
        "has_steps": series.has_steps(report),
        "gate": _gate(report),
        "forecasts": [_forecast_note(name, points) for name, points in series.forecasts(report).items()],
        "facts": {heading: found for heading, found in _facts(report).items() if found},
        "reproduce": reproduce(report),
    }


def _answer(report: StudyReport) -> Context:
    pick = report.picks.get("recommended")
    caveats = report.caveats()
    if pick is None:
        return {"pick": None, "why_nothing": report.why_nothing, "ends": _ends(report), "caveats": caveats}
    names = next(names for names, found in report.picks_by_trial() if "recommended" in names)
    also = ", ".join(title(name) for name in names if name != "recommended")
    return {"pick": _pick(report, pick), "also": also, "verdict": _verdict(report, pick), "caveats": caveats}


def _verdict(report: StudyReport, pick: Data) -> Context:
    """The answer's headline: the speed-up as `factor`, or a `text` in its place; `span` is the interval."""
    if report.baseline is not None and pick["trial"] == report.baseline["trial"]:
        return {
            "factor": "",
            "span": "",
            "text": "Keep your configuration: nothing that was tried is measurably better.",
        }
    if pick.get("speedup") is None:
        why = "did not run" if report.baseline is None else "cannot be compared with it"
        return {"factor": "", "span": "", "text": f"The baseline {why}, so there is no speed-up to state."}
    factor, ends = f"{pick['speedup']:.2f}×", pick.get("speedup_ci95")
    span, gained = f"{ends[0]:.2f}× to {ends[1]:.2f}×" if ends else "", _best_gain(report, pick)
    if pick["speedup"] < 1 and gained:
        return {"factor": "", "span": span, "text": f"{gained}, at {factor} the baseline’s throughput"}
    return {"factor": factor, "span": span, "text": ""}


def _best_gain(report: StudyReport, pick: Data) -> str | None:
    """The objective that a pick improves most, in words."""
    own, base = measured(pick), measured(report.comparable(pick) or {})
    names = [name for name in report.metric_names(all_metrics=False) if name in own and name in base]
    changes = [(gain(name, own[name], base[name]), name) for name in names]
    better = [(change[0], name) for change, name in changes if change and change[1]]
    return (
        "{1} {0:.2f}× better".format(*(max(better)[0], METRICS[max(better)[1]].label.capitalize())) if better else None
    )


def _pick(report: StudyReport, pick: Data, *, all_metrics: bool = True) -> Context:
    """A pick with its configuration, what it changes, its metrics beside the baseline's, and its JSON."""
    changed = differences(pick["candidate"], report.baseline) if report.baseline is not None else []
    return {
        "trial": pick["trial"],
        "configuration": words(pick["candidate"]),
        "changes": [(name.rsplit(".", 1)[-1], level_text(old), level_text(new)) for name, old, new in changed],
        "metrics": _values(report, pick, all_metrics=all_metrics),
        "json": json.dumps(pick["ds_config"], indent=2),
        "reasons": pick.get("reasons") or (),
        "script_side_changes": pick.get("script_side_changes") or (),
    }


def _values(report: StudyReport, pick: Data, *, all_metrics: bool) -> Context:
    """The metrics of a pick beside the baseline's, with change."""
    same = report.baseline is None or report.baseline["trial"] == pick["trial"]
    base = None if same else report.comparable(pick)
    rows = []
    for name in report.metric_names(all_metrics=all_metrics):
        own, reference = measured(pick).get(name), measured(base).get(name) if base else None
        if own is None:
            continue
        scale = metric_scale(name, [own, *([reference] if reference is not None else [])])
        cells = [_value(scale, point, name) for point in ([base, pick] if base else [pick])]
        if base:
            cells.append(_change(gain(name, own, reference) if reference is not None else None))
        rows.append({"label": METRICS[name].label, "unit": scale.unit, "cells": cells})
    head = ["", *(["baseline"] if base else []), f"trial {pick['trial']}", *(["change"] if base else [])]
    return {"head": head, "rows": rows}


def _value(scale: Scale, point: Data, name: str) -> Context:
    value = measured(point).get(name)
    if value is None:
        return {"text": "", "small": "", "kind": ""}
    low, high = interval(point, name, value)
    wide = scale.number(low) != scale.number(high)
    return {"text": scale.number(value), "small": scale.interval(low, high) if wide else "", "kind": ""}


def _change(change: tuple[float, bool] | None) -> Context:
    if change is None:
        return {"text": "", "small": "", "kind": ""}
    factor, better = f"{change[0]:.2f}×", change[1]
    if factor == "1.00×":
        return {"text": "equal", "small": "", "kind": "muted"}
    return {"text": factor, "small": "better" if better else "worse", "kind": "better" if better else "muted"}


def _picks(report: StudyReport) -> list[Context]:
    """The picks beside the recommended one, each with the place of its speed-up on a common bar."""
    found = report.picks_by_trial()
    ends = [end for _, pick in found for end in (pick.get("speedup_ci95") or [pick.get("speedup")]) if end is not None]
    low, high = min([1.0, *ends]) - 0.05, max([1.0, *ends]) + 0.05

    def place(value: float) -> str:
        return f"{100 * (value - low) / (high - low):.1f}%"

    cards = []
    for names, pick in found:
        if "recommended" in names:
            continue
        same = report.baseline is not None and pick["trial"] == report.baseline["trial"]
        factor = None if same else pick.get("speedup")
        span = pick.get("speedup_ci95")
        card = _pick(report, pick, all_metrics=False) | {
            "title": ", ".join(title(name) for name in names),
            "why": "; ".join(PICK_NOTES[name] for name in names if name in PICK_NOTES),
            "is_baseline": same,
            "factor": f"{factor:.2f}×" if factor else "",
            "span": f"{span[0]:.2f}× to {span[1]:.2f}×" if span and factor else "",
            "bar": [place(value) for value in (*(span or (factor, factor)), 1.0, factor)] if factor else [],
        }
        cards.append(card)
    return cards


def _effects(found: Effects) -> Context:
    """A card on what the knobs do to one metric."""
    if found.explained < 0.1:
        note = f"{found.n} trials do not tell: the effects of the knobs in some of them do not hold in the others."
        return {"label": METRICS[found.metric].label, "note": note, "knobs": []}
    note = (
        f"{found.n} trials; {found.explained:.0%} of the spread of trials left out is predicted. The rest is chance"
        " or interplay."
    )
    shown = [effect for effect in found.knobs if effect.share >= 0.01][:MOST_KNOBS]
    return {
        "label": METRICS[found.metric].label,
        "note": note,
        "knobs": [_effect(found.metric, each) for each in shown],
    }


def _effect(metric: str, effect: Effect) -> Context:
    smaller = METRICS[metric].direction == "minimize"
    reference, *others = effect.levels
    others = sorted(others, key=lambda level: level.factor if smaller else -level.factor)[:MOST_LEVELS]
    changes = (f"{level.factor - 1:+.0%}".replace("-0%", "±0%").replace("+0%", "±0%") for level in others)
    worth = (f"{level_text(level.value)} {change}" for level, change in zip(others, changes, strict=True))
    return {
        "knob": effect.knob.rsplit(".", 1)[-1],
        "share": f"{effect.share:.0%}",
        "width": f"{min(100.0, 100 * effect.share):.1f}%",
        "levels": f"{level_text(reference.value)}: {', '.join(worth)}",
    }


def _ends(report: StudyReport) -> str:
    """How many trials ended how, in words."""
    outcomes = [str(trial["outcome"]).replace("_", " ") for trial in report.trials]
    return ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes))


def _table(report: StudyReport) -> Context:
    """Every trial with its configuration, its end, what it measured and why it failed."""
    points, marks = report.points(), report.marks()
    values = [measured(point) for point in points.values()]
    scales = {name: metric_scale(name, [v[name] for v in values if name in v]) for name in report.metric_names()}
    heads = [("trial", "", "n"), ("configuration", "", ""), ("outcome", "", ""), ("speed-up", "", "n")]
    heads += [(METRICS[name].label, scale.unit, "n") for name, scale in scales.items()]
    rows = [
        _row(report, trial, points.get(trial["trial"], trial), scales) | {"marks": marks.get(trial["trial"], [])}
        for trial in report.trials
    ]
    return {"ends": _ends(report), "heads": [*heads, ("wall", "s", "n")], "rows": rows, "style": _columns(scales)}


def _columns(names: Iterable[str]) -> str:
    """The widths of the columns, the same in every row, so that rows out of sight need no layout."""
    metrics = [LONG_METRIC_REM if len(METRICS[name].label) > LONG_LABEL else METRIC_REM for name in names]
    least = TRIAL_REM + OUTCOME_REM + SPEEDUP_REM + sum(metrics) + WALL_REM
    shares = " ".join(f"minmax({width}rem, 1fr)" for width in metrics)
    columns = (
        f"{TRIAL_REM}rem minmax(var(--config), 4fr) minmax({OUTCOME_REM}rem, 2fr) {SPEEDUP_REM}rem {shares}"
        f" {WALL_REM}rem"
    )
    return f"--columns: {columns}; --least: calc(var(--config) + {least:.1f}rem)"


def _row(report: StudyReport, trial: Data, point: Data, scales: Mapping[str, Scale]) -> Context:
    values, wall_s = measured(point), trial.get("wall_s")
    factor = speedup(report, point) if values else None
    numbers = [(f"{factor:.2f}×", f"{factor:.6f}", False) if factor else ("", "", False)]
    for name, scale in scales.items():
        value, extrapolated = values.get(name), name in (trial.get("censored") or ())
        text = "" if value is None else f"{'~' if extrapolated else ''}{scale.number(value)}"
        numbers.append((text, "" if value is None else str(value), extrapolated and value is not None))
    numbers.append(("", "", False) if wall_s is None else (f"{wall_s:.1f}", str(wall_s), False))
    return {
        "trial": trial["trial"],
        "complete": trial["outcome"] == "complete",
        "configuration": words(trial["candidate"]),
        "outcome": str(trial["outcome"]).replace("_", " "),
        "why": _why(trial),
        "numbers": numbers,
    }


def _why(trial: Data) -> str:
    complete = trial["outcome"] == "complete"
    phase = f" (in {trial['phase']})" if trial.get("phase") not in (None, "", "done") and not complete else ""
    reason = f"{trial['reason']}{phase}" if trial.get("reason") else ""
    limits = ["breaks a constraint"] if trial.get("feasible") is False and complete else []
    return "; ".join(text for text in [reason, *limits, *(trial.get("caveats") or ())] if text)


def _gate(report: StudyReport) -> Context | None:
    """The trials that the quality gate looked at, the refused ones first; None if it looked at none."""
    marks = report.marks()
    checked = [trial for trial in report.trials if trial.get("gate")]
    checked.sort(
        key=lambda one: (one["gate"]["passed"] is True, "recommended" not in marks.get(one["trial"], []), one["trial"])
    )
    n_refused = sum(trial["gate"]["passed"] is False for trial in checked)
    cards = [_gate_card(trial) for trial in checked[:MOST_GATE_CARDS]]
    return {"n_checked": len(checked), "n_refused": n_refused, "cards": cards} if checked else None


def _gate_card(trial: Data) -> Context:
    found = trial["gate"]
    verdict = {True: "trains alike", False: "refused: diverged", None: "not decided"}[found["passed"]]
    excess = (
        f"over {found['n_steps']} steps {found['excess']:+.2g} to the reference's loss; up to {found['limit']:.2g}"
        " is chance"
    )
    return {
        "title": f"trial {trial['trial']}: {verdict}",
        "configuration": words(trial["candidate"]),
        "curves": _gate_curves(trial["losses"], found["losses"], found["replicates"]),
        "reason": found["reason"] or excess,
    }


def _gate_curves(
    own: Sequence[float | None], reference: Sequence[float], replicates: Sequence[Sequence[float]]
) -> Context | None:
    """The points of an SVG's lines: replicates, the trial, its reference; None if there is nothing to draw."""
    n = len(reference) or len(own)
    curves = [[float(loss) for loss in curve[:n] if loss is not None] for curve in (*replicates, own, reference)]
    every = [loss for curve in curves for loss in curve]
    if len(every) < 2 or n < 2:
        return None
    low, high = min(every), max(every)

    step_width, per_loss = (GATE_WIDTH - 16) / (n - 1), (GATE_HEIGHT - 16) / (high - low or 1.0)

    def line(curve: Sequence[float]) -> str:
        return " ".join(f"{8 + i * step_width:.1f},{8 + (high - loss) * per_loss:.1f}" for i, loss in enumerate(curve))

    *thin, trial, dashed = map(line, curves)
    label = f"Loss from {high:.3g} to {low:.3g} over {n} steps: the trial beside its reference"
    box = f"0 0 {GATE_WIDTH} {GATE_HEIGHT}"
    return {"box": box, "label": label, "replicates": thin, "trial": trial, "reference": dashed}


def _forecast_note(name: str, points: Sequence[series.ForecastPoint]) -> str:
    errors = [abs(point.measured / point.value - 1) for point in points if point.value > 0]
    held = sum(point.low <= point.measured <= point.high for point in points)
    typical = f"half of the forecasts were within {statistics.median(errors):.0%}; " if errors else ""
    return f"{METRICS[name].label}: {typical}{held} of {len(points)} intervals held what was measured"


def _facts(report: StudyReport) -> dict[str, dict[str, Any]]:
    """Machine, workload, study and versions, each as names and values."""
    environment, study = report.environment, report.study
    memory_bytes = environment.get("device_memory_bytes")
    machine_facts = {
        "device": environment.get("device_name"),
        "devices": environment.get("n_devices"),
        "memory of one": format_bytes(memory_bytes) if memory_bytes else None,
        "accelerator": environment.get("accelerator"),
        "processor cores": environment.get("n_cores"),
        "bf16": environment.get("bf16"),
        "fp16": environment.get("fp16"),
    }
    stated = {
        name.replace("_", " ").removeprefix("n "): value
        for name, value in study.items()
        if isinstance(value, str | int | float)
    }
    shown = {name: value for name, value in stated.items() if name not in HIDDEN_FIELDS and value != ""}
    own = {
        "objectives": ", ".join(METRICS[name].label for name in report.metric_names(all_metrics=False)),
        "wall time": format_duration(study["wall_s"]) if study.get("wall_s") else None,
    }
    versions = dict(environment.get("versions") or {})
    return {"Machine": machine_facts, "Workload": _workload(report), "Study": shown | own, "Versions": versions}


def _workload(report: StudyReport) -> dict[str, Any]:
    workload = report.workload
    if not workload:
        return {}
    n = workload.get("n_blocks")
    blocks = f"{n} × {workload['block_class']}, {workload['block_share']:.0%} of the parameters" if n else "none"
    return {
        "target": PurePath(str(report.study.get("target", ""))).name,
        "parameters": f"{workload['n_parameters']:,}",
        "trainable": f"{workload['n_trainable']:,}",
        "samples": f"{workload['n_samples']:,}" if workload.get("n_samples") else "no end",
        "repeated blocks": blocks,
        "optimizer": "the target's own" if workload.get("client_optimizer") else "from the JSON",
    }
