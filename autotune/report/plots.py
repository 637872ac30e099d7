"""What the page draws its plots from, as plain data, small enough that 1,000 trials stay small."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autotune import stats
from autotune.objective import METRICS
from autotune.report import Data, StudyReport, interval, measured, units, words

# A loss curve is averaged into this many pieces, and this many curves are drawn together: enough to see.
PIECES = 60
CURVES = 80
# The times of steps are cut into no more pieces than this, fewer where there are many trials: each has its own, and the page stays small.
STEP_PIECES, LEAST_STEP_PIECES, ALL_STEP_PIECES = 120, 20, 80_000


def data(report: StudyReport) -> dict[str, Any]:
    """Everything the page's script draws."""
    every = {one["trial"]: one for one in report.trials} | report.points()
    return {
        **_points(report),
        "words": {number: words(one["candidate"]) for number, one in every.items()},
        "knobs": [
            {"name": name, "levels": [said(level) for level in levels]} for name, levels in knobs(report).items()
        ],
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
    return {
        name: units.scale(name, [measured(p)[name] for p in points if name in measured(p)])
        for name in report.metric_names()
    }


def _points(report: StudyReport) -> dict[str, Any]:
    marks, front = report.marks(), {point["trial"] for point in report.front}
    infeasible = {one["trial"] for one in report.trials if one.get("feasible") is False}
    written = scales(report)
    places = {name: {repr(level): i for i, level in enumerate(levels)} for name, levels in knobs(report).items()}
    metrics = [
        {"name": name, "label": METRICS[name].label, "direction": METRICS[name].direction}
        | {"unit": scale.unit, "factor": scale.factor, "decimals": scale.decimals}
        for name, scale in written.items()
    ]
    points = [
        {
            "trial": number,
            "marks": marks.get(number, []),
            "front": number in front,
            "feasible": number not in infeasible,
            "m": {
                name: _short(value, *interval(point, name, value))
                for name, value in measured(point).items()
                if name in written
            },
            "k": [place[repr(point["candidate"].get(name))] for name, place in places.items()],
        }
        for number, point in report.points().items()
    ]
    return {"metrics": metrics, "points": points, "objectives": report.metric_names(all_metrics=False)}


def _short(*values: float) -> list[float]:
    """Values in as many digits as a plot can show."""
    return [float(f"{value:.6g}") for value in values]


def knobs(report: StudyReport) -> dict[str, list[Any]]:
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


def _having(report: StudyReport, series: str) -> Iterable[Data]:
    """The trials that have such a curve, those of the picks and the baseline first."""
    marks, front = report.marks(), {point["trial"] for point in report.front}
    order = sorted(report.trials, key=lambda one: (one["trial"] not in marks, one["trial"] not in front, one["trial"]))
    return (one for one in order if sum(value is not None for value in one.get(series) or ()) > 1)


def _cut(n: int, pieces: int) -> list[range]:
    size = max(1, -(-n // pieces))
    return [range(start, min(start + size, n)) for start in range(0, n, size)]


def losses(report: StudyReport) -> list[dict[str, Any]]:
    """Loss curves, averaged into pieces."""
    marks = report.marks()
    return [
        _curve(report, one, marks.get(one["trial"], [])) for one in itertools.islice(_having(report, "losses"), CURVES)
    ]


def _curve(report: StudyReport, one: Data, marks: Sequence[str]) -> dict[str, Any]:
    values, candidate, times = one["losses"], one["candidate"], one.get("step_times_s") or []
    batch = (
        candidate.get("micro_batch_size", 1) * candidate.get("gradient_accumulation_steps", 1) * report.data_parallel
    )
    pieces = _cut(len(values), PIECES)
    found = [[values[i] for i in piece if values[i] is not None] for piece in pieces]
    middle = [piece.start + (len(piece) + 1) / 2 for piece in pieces]
    seconds = list(itertools.accumulate(times)) if len(times) == len(values) else []
    return {
        "trial": one["trial"],
        "marks": list(marks),
        "loss": [round(sum(piece) / len(piece), 5) if piece else None for piece in found],
        "steps": middle,
        "samples": [step * batch for step in middle],
        "seconds": [round(seconds[piece[len(piece) // 2]], 4) for piece in pieces] if seconds else [],
    }


def _steps(report: StudyReport) -> list[dict[str, Any]]:
    """The time of every step, in pieces of which the median and the longest are kept, so that an outlier is not averaged away."""
    marks, found = report.marks(), []
    most = max(LEAST_STEP_PIECES, min(STEP_PIECES, ALL_STEP_PIECES // max(1, len(report.trials))))
    for one in _having(report, "step_times_s"):
        times = [float(value) for value in one["step_times_s"]]
        pieces = [sorted(times[piece.start : piece.stop]) for piece in _cut(len(times), most)]
        warmup = one.get("n_warmup")
        found.append({
            "trial": one["trial"],
            "marks": list(marks.get(one["trial"], [])),
            "n": len(times),
            "size": len(pieces[0]),
            "ms": _short(*(1e3 * piece[len(piece) // 2] for piece in pieces)),
            "high": _short(*(1e3 * piece[-1] for piece in pieces)) if len(pieces[0]) > 1 else [],
            "warmup": stats.warmup_steps(times) if warmup is None else warmup,
        })  # fmt: skip
    return found


def _progress(report: StudyReport) -> list[dict[str, Any]]:
    """Each trial with the seconds that trials had taken by its end, and its gain over the baseline as a compromise."""
    weights: Mapping[str, float] = report.study.get("weights") or {}
    base = next(
        (trial for trial in report.trials if report.baseline and trial["trial"] == report.baseline["trial"]), None
    )
    names, spent = report.metric_names(all_metrics=False), 0.0
    found = []
    for one in report.trials:
        spent += float(one.get("wall_s") or 0.0)
        complete = one["outcome"] == "complete" and one.get("feasible") is not False
        found.append({
            "trial": one["trial"],
            "at": round(spent, 2),
            "outcome": str(one["outcome"]).replace("_", " "),
            "gain": _gain(report, one, base, weights) if complete and base else None,
            "m": {name: _short(value)[0] for name, value in measured(one).items() if name in names} if complete else {},
        })  # fmt: skip
    return found


def forecasts(report: StudyReport) -> dict[str, list[dict[str, Any]]]:
    """What each trial was expected to measure and what it did, by metric; re-measurements, which nobody forecast, are left out."""
    found: dict[str, list[dict[str, Any]]] = {}
    for one in report.trials:
        for name, said_ in (one.get("forecast") or {}).items():
            was = measured(one).get(name)
            if name in METRICS and was and all(math.isfinite(value) for value in said_):
                found.setdefault(name, []).append({"trial": one["trial"], "said": _short(*said_), "was": was})
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
