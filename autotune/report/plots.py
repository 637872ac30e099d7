"""What the page draws its plots from, as plain data, small enough that 1,000 trials stay small."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autotune import stats
from autotune.analysis.effects import Effects, effects
from autotune.objective import METRICS
from autotune.report import Data, StudyReport, interval, measured, units, words

# A curve is averaged into this many pieces, and this many curves are kept: enough to see.
PIECES = 60
CURVES = 80


def data(report: StudyReport) -> dict[str, Any]:
    """Everything the page's script draws."""
    return {
        **_points(report),
        "knobs": [{"name": name, "levels": [said(level) for level in levels]} for name, levels in _knobs(report).items()],
        "losses": losses(report),
        "steps": _steps(report),
        "progress": _progress(report),
        "forecasts": forecasts(report),
    }


def said(value: Any) -> str:
    """A knob's value for people."""
    if value is None:
        return "default"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def scales(report: StudyReport) -> dict[str, units.Scale]:
    """How the values of each metric are written on the page."""
    points = report.points().values()
    return {name: units.scale(name, [measured(p)[name] for p in points if name in measured(p)]) for name in report.metric_names()}


def what_mattered(report: StudyReport) -> list[Effects]:
    """The effects of the knobs on each objective, where the trials tell."""
    points = [point for point in report.points().values() if "candidate" in point]
    # The user's own configuration is trial 0, even where it did not run.
    reference = report.trials[0]["candidate"] if report.trials else {}
    names = report.metric_names(all_metrics=False)
    found = (
        effects(name, [(point["candidate"], measured(point)[name]) for point in points if name in measured(point)], reference)
        for name in names
    )
    return [each for each in found if each is not None]


def _points(report: StudyReport) -> dict[str, Any]:
    marks, front = report.marks(), {point["trial"] for point in report.front}
    infeasible = {one["trial"] for one in report.trials if one.get("feasible") is False}
    written, knobs = scales(report), _knobs(report)
    places = {name: {repr(level): i for i, level in enumerate(levels)} for name, levels in knobs.items()}
    metrics = [
        {"name": name, "label": METRICS[name].label, "direction": METRICS[name].direction}
        | {"unit": scale.unit, "factor": scale.factor, "decimals": scale.decimals}
        for name, scale in written.items()
    ]
    points = [
        {
            "trial": number,
            "words": words(point["candidate"]),
            "marks": marks.get(number, []),
            "front": number in front,
            "feasible": number not in infeasible,
            "m": {name: [value, *interval(point, name, value)] for name, value in measured(point).items() if name in written},
            "k": [place[repr(point["candidate"].get(name))] for name, place in places.items()],
        }
        for number, point in report.points().items()
    ]
    return {"metrics": metrics, "points": points, "objectives": report.metric_names(all_metrics=False)}


def _knobs(report: StudyReport) -> dict[str, list[Any]]:
    """The knobs that differ between the trials that were measured, each with its values in order."""
    candidates = [point["candidate"] for point in report.points().values()]
    names = dict.fromkeys(name for candidate in candidates for name in candidate)
    found = {}
    for name in names:
        levels = {repr(candidate.get(name)): candidate.get(name) for candidate in candidates}
        if len(levels) > 1:
            found[name] = sorted(levels.values(), key=_order)
    return found


def _order(value: Any) -> tuple[int, float, str]:
    """Defaults first, then numbers by size, then words."""
    if value is None:
        return 0, 0.0, ""
    return (1, float(value), "") if isinstance(value, int | float) else (2, 0.0, str(value))


def _chosen(report: StudyReport, series: str) -> Iterable[Data]:
    """The trials whose curves are kept, those of the picks and the baseline first."""
    marks, front = report.marks(), {point["trial"] for point in report.front}
    order = sorted(report.trials, key=lambda one: (one["trial"] not in marks, one["trial"] not in front, one["trial"]))
    having = (one for one in order if sum(value is not None for value in one.get(series) or ()) > 1)
    return itertools.islice(having, CURVES)


def _cut(n: int, pieces: int) -> list[range]:
    size = max(1, -(-n // pieces))
    return [range(start, min(start + size, n)) for start in range(0, n, size)]


def losses(report: StudyReport) -> list[dict[str, Any]]:
    """Loss curves, averaged into pieces."""
    marks = report.marks()
    return [_curve(report, one, marks.get(one["trial"], [])) for one in _chosen(report, "losses")]


def _curve(report: StudyReport, one: Data, marks: Sequence[str]) -> dict[str, Any]:
    values, candidate, times = one["losses"], one["candidate"], one.get("step_times_s") or []
    batch = candidate.get("micro_batch_size", 1) * candidate.get("gradient_accumulation_steps", 1) * report.data_parallel
    pieces = _cut(len(values), PIECES)
    found = [[values[i] for i in piece if values[i] is not None] for piece in pieces]
    middle = [piece.start + (len(piece) + 1) / 2 for piece in pieces]
    seconds = list(itertools.accumulate(times)) if len(times) == len(values) else []
    return {
        "trial": one["trial"],
        "words": words(candidate),
        "marks": list(marks),
        "loss": [round(sum(piece) / len(piece), 5) if piece else None for piece in found],
        "steps": middle,
        "samples": [step * batch for step in middle],
        "seconds": [round(seconds[piece[len(piece) // 2]], 4) for piece in pieces] if seconds else [],
    }


def _steps(report: StudyReport) -> list[dict[str, Any]]:
    """The time of every step, in pieces of which the median and the longest are kept, so that an outlier is not averaged away."""
    marks, found = report.marks(), []
    for one in _chosen(report, "step_times_s"):
        times = [float(value) for value in one["step_times_s"]]
        pieces = _cut(len(times), 2 * PIECES)
        sorted_pieces = [sorted(times[piece.start : piece.stop]) for piece in pieces]
        found.append({
            "trial": one["trial"],
            "words": words(one["candidate"]),
            "marks": list(marks.get(one["trial"], [])),
            "step": [piece.start + (len(piece) + 1) / 2 for piece in pieces],
            "ms": [round(1e3 * piece[len(piece) // 2], 3) for piece in sorted_pieces],
            "high": [round(1e3 * piece[-1], 3) for piece in sorted_pieces],
            "warmup": stats.warmup_steps(times),
        })  # fmt: skip
    return found


def _progress(report: StudyReport) -> list[dict[str, Any]]:
    """Each trial with the seconds that trials had taken by its end, and its gain over the baseline as a compromise."""
    weights: Mapping[str, float] = report.study.get("weights") or {}
    base = next((trial for trial in report.trials if report.baseline and trial["trial"] == report.baseline["trial"]), None)
    names, spent = report.metric_names(all_metrics=False), 0.0
    found = []
    for one in report.trials:
        spent += float(one.get("wall_s") or 0.0)
        complete = one["outcome"] == "complete" and one.get("feasible") is not False
        found.append({
            "trial": one["trial"],
            "at": round(spent, 2),
            "outcome": str(one["outcome"]).replace("_", " "),
            "words": words(one["candidate"]),
            "gain": _gain(report, one, base, weights) if complete and base else None,
            "m": {name: value for name, value in measured(one).items() if name in names} if complete else {},
        })  # fmt: skip
    return found


def forecasts(report: StudyReport) -> dict[str, list[dict[str, Any]]]:
    """What each trial was expected to measure and what it did, by metric; re-measurements, which nobody forecast, are left out."""
    found: dict[str, list[dict[str, Any]]] = {}
    for one in report.trials:
        for name, said_ in (one.get("forecast") or {}).items():
            was = measured(one).get(name)
            if name in METRICS and was and all(math.isfinite(value) for value in said_):
                found.setdefault(name, []).append(
                    {"trial": one["trial"], "words": words(one["candidate"]), "said": list(said_), "was": was}
                )
    return found


def _gain(report: StudyReport, one: Data, base: Data, weights: Mapping[str, float]) -> float | None:
    """Weighted geometric mean of the gains over the baseline, both as their own trials measured them."""
    names = report.metric_names(all_metrics=False)
    own, reference = measured(one), measured(base)
    if not all(own.get(name, 0) > 0 and reference.get(name, 0) > 0 for name in names):
        return None
    product, total = 1.0, sum(weights.get(name, 1.0) for name in names)
    for name in names:
        ratio = reference[name] / own[name] if METRICS[name].direction == "minimize" else own[name] / reference[name]
        product *= ratio ** (weights.get(name, 1.0) / total)
    return round(product, 5)
