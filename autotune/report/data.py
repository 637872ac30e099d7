"""What a person or another tool takes away from a study; here its data, and how trials and picks are named."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

from autotune.errors import UserError
from autotune.scoring.effects import Effects, effects
from autotune.scoring.metrics import METRICS
from autotune.space.candidate import Candidate
from autotune.study.parallel import BESIDE
from autotune.system.units import Scale, scale_for
from autotune.trial.command import Invocation

Data: TypeAlias = Mapping[str, Any]

TITLES = {"drop_in": "drop-in", "out_of_reach": "out of reach"}
PICK_NOTES = {
    "recommended": "the best compromise of the objectives",
    "drop_in": "keeps the baseline's global batch and numerics",
    "lowest_latency": "the shortest optimizer step",
    "highest_throughput": "the most samples per second",
    "fastest_convergence": "the soonest at any target, by goodput",
    "lowest_memory": "the least memory at its peak",
    "out_of_reach": "the best of what only a trial can run",
}


@dataclass(frozen=True, kw_only=True)
class StudyReport:
    """A study as plain data: the one input of everything in this package.

    Attributes:
        study: `name`, `target`, `ranks`, `objectives` (names of metrics, in order), `n_trials`, `wall_s`, and what else
            is worth showing.
        recommended: The content of `recommended.json`: `picks` by name, and `baseline`.
        front: The content of `front.json`.
        trials: Every trial: `trial`, `role`, `outcome`, `reason`, `phase`, `candidate`, `metrics`, `ci95`, `wall_s`,
            `caveats`, and where known `losses`, `step_times_s`, `n_warmup` (steps that were not timed), `censored`
            (metrics that are extrapolated), `feasible`, `phase_times_s`, `gate` (what the quality gate said),
            `forecast` (by metric what the trials before led to expect: value and both ends of the 90 % interval).
        environment: The fields of `trial.Environment`.
        workload: The fields of `trial.Workload`.
        invocation: How the script is started, where a script was tuned.
    """

    study: Data
    recommended: Data
    front: Sequence[Data]
    trials: Sequence[Data]
    environment: Data = field(default_factory=dict)
    workload: Data = field(default_factory=dict)
    invocation: Invocation | None = None

    @property
    def name(self) -> str:
        """The study's name."""
        return str(self.study["name"])

    @property
    def world_size(self) -> int:
        """Ranks of every trial."""
        return int(self.study.get("ranks") or 1)

    @property
    def data_parallel(self) -> int:
        """Ranks with data of their own: all of them, but for the stages of a pipeline."""
        return int(self.study.get("data_parallel") or self.world_size)

    @property
    def baseline(self) -> Data | None:
        """The user's own configuration, measured; None if it did not complete."""
        return self.recommended.get("baseline") or None

    @property
    def picks(self) -> Mapping[str, Data]:
        """The picks by name."""
        return self.recommended.get("picks") or {}

    @property
    def why_nothing(self) -> str:
        """Why there is no pick, where there is none."""
        n_complete = sum(trial["outcome"] == "complete" for trial in self.trials)
        n_out, n_unfit = (
            sum(trial["outcome"] == outcome for trial in self.trials) for outcome in ("oom", "predicted_oom")
        )
        if n_out and n_out + n_unfit == len(self.trials):
            predicted = f", {n_unfit} more are predicted to" if n_unfit else ""
            return f"no configuration fits the device memory: {n_out} ran out of it{predicted}"
        return (
            f"{n_complete} configurations completed, but none keeps every constraint and passed its checks"
            if n_complete
            else "no configuration completed"
        )

    def picks_by_trial(self) -> list[tuple[list[str], Data]]:
        """Each picked trial once, with all that it was picked for."""
        names: dict[int, list[str]] = {}
        for name, pick in self.picks.items():
            names.setdefault(pick["trial"], []).append(name)
        return [(found, self.picks[found[0]]) for found in names.values()]

    def metric_names(self, *, all_metrics: bool = True) -> list[str]:
        """The objectives in order, then what else was measured."""
        objectives = [name for name in self.study.get("objectives", ()) if name in METRICS]
        return (
            [*objectives, *(name for name in METRICS if name in self._seen and name not in objectives)]
            if all_metrics
            else objectives
        )

    def table(self) -> list[Data]:
        """What an overview lists: the front, picks that are not on it, and the baseline last."""
        others = [pick for _, pick in self.picks_by_trial()]
        found = {point["trial"]: point for point in [*others, *self.front]}
        base = found.pop(self.baseline["trial"], self.baseline) if self.baseline else None
        return [*(found[trial] for trial in sorted(found)), *([base] if base else [])]

    def points(self) -> dict[int, Data]:
        """The measurements by trial; of trials that were measured again those that the recommendation rests on."""
        return self._points

    def comparable(self, point: Data) -> Data | None:
        """The baseline as it was measured when the point was: in its own trial, or again in turns with the finalists.

        A machine that has become faster in between would else be taken for a better configuration.
        """
        base, own = self.baseline, self._by_number.get(point["trial"])
        if base is None or own is None or measured(own) != measured(point):
            return base
        return self._by_number.get(base["trial"], base)

    def marks(self) -> dict[int, list[str]]:
        """What each trial stands for, by trial: titles of its picks, and `baseline`."""
        found = {pick["trial"]: [title(name) for name in names] for names, pick in self.picks_by_trial()}
        if self.baseline:
            found.setdefault(self.baseline["trial"], []).append("baseline")
        return found

    @cached_property
    def effects(self) -> list[Effects]:
        """What the knobs do to each objective, where the trials tell."""
        points = [point for point in self.points().values() if "candidate" in point]
        # The user's own configuration is trial 0, even where it did not run.
        reference = self.trials[0]["candidate"] if self.trials else {}
        found = (
            effects(
                name,
                [(point["candidate"], measured(point)[name]) for point in points if name in measured(point)],
                reference,
            )
            for name in self.metric_names(all_metrics=False)
        )
        return [each for each in found if each is not None]

    # With 1,000 trials these are asked for 1,000 times.
    @cached_property
    def _seen(self) -> set[str]:
        return {name for trial in self.trials for name in measured(trial)}

    @cached_property
    def _by_number(self) -> dict[int, Data]:
        return {trial["trial"]: trial for trial in self.trials}

    @cached_property
    def _points(self) -> dict[int, Data]:
        picked = [*self.front, *self.picks.values(), *([self.baseline] if self.baseline else [])]
        return {trial["trial"]: trial for trial in self.trials if measured(trial)} | {
            point["trial"]: point for point in picked
        }

    def caveats(self) -> list[str]:
        """What the user should know: about the target, and about the trials that the answer rests on."""
        shown = {point["trial"] for point in (*self.picks.values(), *([self.baseline] if self.baseline else []))}
        found = [str(text) for text in (self.study.get("ended"), *(self.workload.get("caveats") or ())) if text]
        for trial in self.trials:
            if trial["trial"] in shown:
                found += [f"trial {trial['trial']}: {text}" for text in trial.get("caveats") or ()]
        if n := sum(any(BESIDE in text for text in trial.get("caveats") or ()) for trial in self.trials):
            found.append(
                f"{n} of {len(self.trials)} trials {BESIDE} as others (--overlap): their times are not those of a"
                " trial alone"
            )
        for trial in self.trials:
            if trial.get("role") == "baseline" and self.baseline is None:
                found.insert(0, f"the baseline did not complete ({_end(trial)}), so no speed-up can be stated")
        return list(dict.fromkeys(found))


def measured(point: Data) -> dict[str, float]:
    """The metrics that a trial or a pick yielded."""
    return {
        name: float(value)
        for name, value in (point.get("metrics") or {}).items()
        if value is not None and math.isfinite(value)
    }


def interval(point: Data, metric: str, value: float) -> tuple[float, float]:
    """The 95 % interval of a metric's value; the value twice where there is none."""
    low, high = (point.get("ci95") or {}).get(metric) or (value, value)
    return (min(low, value), max(high, value)) if math.isfinite(low) and math.isfinite(high) else (value, value)


def metric_scale(metric: str, values: Iterable[float]) -> Scale:
    """How values of a metric are written when they are compared: one unit, one number of decimals."""
    return scale_for(METRICS[metric].unit if metric in METRICS else "", values)


def quantity(metric: str, value: float) -> str:
    """One value of a metric with its unit."""
    return metric_scale(metric, [value]).quantity(value)


def title(pick: str) -> str:
    """A pick's name for people: `lowest_latency` is `lowest latency`."""
    return TITLES.get(pick, pick.replace("_", " "))


def words(values: Data) -> str:
    """A candidate, given as flat knob values, in a few words."""
    return _words(tuple(values), *values.values())


@lru_cache(maxsize=20_000, typed=True)  # a page says them of each trial ten times; `True` and 1 are not the same words
def _words(names: tuple[str, ...], *knobs: Any) -> str:
    values = dict(zip(names, knobs, strict=True))
    try:
        return Candidate.of(values).describe()
    except UserError:  # written by another version
        return ", ".join(f"{name}={value}" for name, value in values.items())


def differences(values: Data, baseline: Data | None) -> list[tuple[str, Any, Any]]:
    """The knobs in which a candidate differs from the baseline: name, before, after."""
    before = dict(baseline["candidate"]) if baseline else {}
    names = dict.fromkeys([*before, *values])
    return [(name, before.get(name), values.get(name)) for name in names if before.get(name) != values.get(name)]


def speedup(report: StudyReport, point: Data) -> float | None:
    """Throughput over the baseline's; None if the baseline did not run."""
    stated = next((pick for pick in report.picks.values() if pick["trial"] == point["trial"]), point)
    if stated.get("speedup") is not None:
        return float(stated["speedup"])
    base = report.comparable(point)
    own, reference = measured(point).get("samples_per_s"), measured(base).get("samples_per_s") if base else None
    return own / reference if own and reference else None


def gain(metric: str, value: float, reference: float) -> tuple[float, bool] | None:
    """The factor between a value and a reference, and whether it is better; None unless both are positive."""
    if value <= 0 or reference <= 0:
        return None
    ratio = reference / value if METRICS[metric].direction == "minimize" else value / reference
    return (ratio, True) if ratio >= 1 else (1 / ratio, False)


def _end(trial: Data) -> str:
    return f"{trial['outcome']}: {trial['reason']}" if trial.get("reason") else str(trial["outcome"])
