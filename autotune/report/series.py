"""The series of numbers that figures draw: loss curves, step times, search progress, forecasts, knob values."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from autotune.report.data import Data, StudyReport, measured
from autotune.report.trial_notes import end_words
from autotune.scoring import step_times
from autotune.scoring.effects import Effect
from autotune.scoring.metrics import METRICS
from autotune.space.candidate import Candidate

MOST_LOSS_POINTS = 60
MOST_KNOBS = 8  # more axes than that are not read
MOST_LOSS_CURVES = 80
# Each trial has its own curve of step times; with many trials they have fewer points, so that the page stays small.
MOST_STEP_POINTS, LEAST_STEP_POINTS, STEP_POINTS_OF_STUDY = 120, 20, 80_000


@dataclass(frozen=True, kw_only=True)
class LossCurve:
    """The loss of one trial, averaged over pieces of the run.

    Attributes:
        marks: What the trial is: titles of picks, `baseline`.
        loss: Mean loss of each piece; None where no loss was finite.
        across: The middle of each piece in `samples`, `seconds` (empty if not timed) and `steps`.
    """

    trial: int
    marks: list[str]
    loss: list[float | None]
    across: dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class StepCurve:
    """The step times of one trial in pieces of equal length.

    Attributes:
        marks: What the trial is: titles of picks, `baseline`.
        median_ms: Median step time of each piece.
        longest_ms: Longest step of each piece, so that an outlier is not averaged away.
        n_warmup: Steps before timing began.
    """

    trial: int
    marks: list[str]
    n: int
    size: int
    median_ms: list[float]
    longest_ms: list[float]
    n_warmup: int


@dataclass(frozen=True, kw_only=True)
class ProgressPoint:
    """One trial in the course of the search.

    Attributes:
        ended_s: Seconds that trials had taken when this one ended.
        outcome: How it ended, in words.
        gain: Weighted geometric mean of the gains over the baseline; None if it cannot be stated.
        sound: Whether no check speaks against it.
    """

    trial: int
    ended_s: float
    outcome: str
    gain: float | None
    sound: bool
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ForecastPoint:
    """What one trial was expected to measure, with a 90 % interval, and what it measured."""

    trial: int
    value: float
    low: float
    high: float
    measured: float


def level_text(value: Any) -> str:
    """A knob's value in words."""
    if value is None:
        return "default"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def knobs(report: StudyReport) -> dict[str, list[Any]]:
    """The knobs that differ between the compared trials, at most the eight that matter most, with values in order."""
    candidates = [point["candidate"] for point in report.compared.values()]
    found = {}
    for name in dict.fromkeys(name for candidate in candidates for name in candidate):
        levels = {repr(candidate.get(name)): candidate.get(name) for candidate in candidates}
        if len(levels) > 1:
            found[name] = sorted(levels.values(), key=_order)
    if len(found) <= MOST_KNOBS:
        return found
    shares = {
        name: max((e.share for each in report.effects for e in each.knobs if name in e.knobs), default=0.0)
        for name in found
    }
    kept = sorted(found, key=lambda name: -shares[name])[:MOST_KNOBS]
    return {name: levels for name, levels in found.items() if name in kept}


def short_names(names: Iterable[str]) -> dict[str, str]:
    """The last words of each knob's name, as many as tell it from the others: `pin_memory`, or `offload_param.pin_memory`."""
    known = list(dict.fromkeys(names))

    def ends_alike(tail: str) -> int:
        return sum(f".{name}".endswith(f".{tail}") for name in known)

    def short(name: str) -> str:
        words = name.split(".")
        tails = (".".join(words[-n:]) for n in range(1, len(words) + 1))
        return next((tail for tail in tails if ends_alike(tail) == 1), name)

    return {name: short(name) for name in known}


def effect_names(effects: Iterable[Effect]) -> dict[tuple[str, ...], str]:
    """The short names of the knobs of effects, joined for those that changed together, by `Effect.knobs`."""
    each = [effect.knobs for effect in effects]
    names = short_names(itertools.chain(*each))
    return {knobs: " with ".join(map(names.__getitem__, knobs)) for knobs in each}


def losses(report: StudyReport) -> list[LossCurve]:
    """The loss curves, those of the picks and the baseline first."""
    return [_loss_curve(report, each) for each in itertools.islice(_trials_with(report, "losses"), MOST_LOSS_CURVES)]


def above(curve: LossCurve, base: LossCurve, across: str) -> list[float | None]:
    """How far a loss curve lies above another one, at its own points; None where the other one does not reach."""
    known = [(x, y) for x, y in zip(base.across[across], base.loss, strict=False) if y is not None]
    if not known:
        return [None] * len(curve.loss)
    places, values = zip(*known, strict=True)
    reference = np.interp(curve.across[across], places, values, left=math.nan, right=math.nan)
    pairs = zip(curve.loss, map(float, reference), strict=False)
    return [None if own is None or math.isnan(other) else round(own - other, 5) for own, other in pairs]


def steps(report: StudyReport) -> list[StepCurve]:
    """The step times of every timed trial, those of the picks and the baseline first."""
    found = []
    n_points = max(LEAST_STEP_POINTS, min(MOST_STEP_POINTS, STEP_POINTS_OF_STUDY // max(1, len(report.trials))))
    for trial in _trials_with(report, "step_times_s"):
        times_s = [float(value) for value in trial["step_times_s"]]
        pieces = [sorted(times_s[piece.start : piece.stop]) for piece in _pieces(len(times_s), n_points)]
        n_warmup = trial.get("n_warmup")
        curve = StepCurve(
            trial=trial["trial"],
            marks=report.marks.get(trial["trial"], []),
            n=len(times_s),
            size=len(pieces[0]),
            median_ms=[rounded(1e3 * piece[len(piece) // 2]) for piece in pieces],
            longest_ms=[rounded(1e3 * piece[-1]) for piece in pieces],
            n_warmup=step_times.warmup_steps(times_s) if n_warmup is None else n_warmup,
        )
        found.append(curve)
    return found


def progress(report: StudyReport) -> list[ProgressPoint]:
    """Every trial in order, with its gain over the baseline by all measurements."""
    spent_s, found = 0.0, []
    for trial in report.trials:
        spent_s += float(trial.get("wall_s") or 0.0)
        values = measured(trial) if trial["trial"] in report.compared else {}
        point = ProgressPoint(
            trial=trial["trial"],
            ended_s=round(spent_s, 2),
            outcome=end_words(trial)[0],
            gain=_gain(report, trial) if values else None,
            sound=not trial.get("doubt"),
            metrics={name: values[name] for name in report.objectives if name in values},
        )
        found.append(point)
    return found


def forecasts(report: StudyReport) -> dict[str, list[ForecastPoint]]:
    """Forecast and first measurement of each trial by metric: the estimate has been drawn towards the forecast."""
    found: dict[str, list[ForecastPoint]] = {}
    for trial in report.trials:
        for name, (value, low, high) in (trial.get("forecast") or {}).items():
            own = measured(trial).get(name)
            if name == "step_time_s" and trial.get("readings_s"):
                own = trial["readings_s"][0]
            if name in METRICS and own and all(map(math.isfinite, (value, low, high))):
                point = ForecastPoint(trial=trial["trial"], value=value, low=low, high=high, measured=own)
                found.setdefault(name, []).append(point)
    return found


def rounded(value: float) -> float:
    """The value in as many digits as a figure can show."""
    return float(f"{value:.6g}")


def _order(value: Any) -> tuple[int, float, str]:
    """Sort key: defaults first, then numbers by size, then words."""
    if value is None:
        return 0, 0.0, ""
    return (1, float(value), "") if isinstance(value, int | float) else (2, 0.0, str(value))


def _trials_with(report: StudyReport, series: str) -> Iterable[Data]:
    """The trials with at least two values of a series, picks and baseline first."""
    marks, front = report.marks, {point["trial"] for point in report.front}
    order = sorted(report.trials, key=lambda one: (one["trial"] not in marks, one["trial"] not in front, one["trial"]))
    return (one for one in order if sum(value is not None for value in one.get(series) or ()) > 1)


def piece_size(n: int, most: int = MOST_LOSS_POINTS) -> int:
    """Number of steps that one of at most `most` points of a curve stands for, by the length of the curve."""
    return max(1, -(-n // most))


def pieces_of(losses: Sequence[float | None]) -> list[float | None]:
    """A loss curve, averaged over pieces; None where no loss was finite."""
    finite = [
        [loss for loss in losses[p.start : p.stop] if loss is not None] for p in _pieces(len(losses), MOST_LOSS_POINTS)
    ]
    return [round(sum(piece) / len(piece), 5) if piece else None for piece in finite]


def _pieces(n: int, most: int) -> list[range]:
    size = piece_size(n, most)
    return [range(start, min(start + size, n)) for start in range(0, n, size)]


def _loss_curve(report: StudyReport, trial: Data) -> LossCurve:
    values, candidate, times_s = trial["losses"], trial["candidate"], trial.get("step_times_s") or []
    own = Candidate.of({"micro_batch_size": 1, **candidate}).global_batch_size(report.data_parallel)
    batch = trial.get("losses_batch") or own  # the quality gate may have trained it at another one
    pieces = _pieces(len(values), MOST_LOSS_POINTS)
    middle = [piece.start + (len(piece) + 1) / 2 for piece in pieces]
    elapsed_s = list(itertools.accumulate(times_s)) if len(times_s) == len(values) else []
    return LossCurve(
        trial=trial["trial"],
        marks=report.marks.get(trial["trial"], []),
        loss=pieces_of(values),
        across={
            "samples": [step * batch for step in middle],
            "seconds": [round(elapsed_s[piece[len(piece) // 2]], 4) for piece in pieces] if elapsed_s else [],
            "steps": middle,
        },
    )


def _gain(report: StudyReport, trial: Data) -> float | None:
    """Weighted geometric mean of the gains over the baseline; None where one of them is not known."""
    gains, weights = trial.get("gains") or {}, report.study.get("weights") or {}
    if not gains.keys() >= {*report.objectives}:
        return None
    logs = [math.log(gains[name][0]) for name in report.objectives]
    return round(math.exp(fmean(logs, [weights.get(name, 1.0) for name in report.objectives])), 5)
