"""Objectives and constraints on metrics, and the score of a trial."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from autotune.errors import UserError
from autotune.scoring.convergence.time_to_loss import Reference
from autotune.scoring.metrics import GOODPUT, METRICS, Direction, check_metric, measure
from autotune.scoring.rates import Estimate
from autotune.system.units import finite, parse_bytes, parse_seconds
from autotune.trial.result import TrialResult

# A bound on a metric: which end of what is allowed it is, and the amount.
Bound = tuple[str, Literal["min", "max"], float]


def beyond(value: float, bound: Bound) -> float:
    """By how much a value of its metric is beyond a bound; 0 or less if it holds that."""
    _, end, amount = bound
    return value - amount if end == "max" else amount - value


def parse_amount(value: Any, metric: str) -> float:
    """An amount of a metric, in the metric's unit; bytes and seconds may carry a unit (`4GiB`, `250ms`)."""
    match METRICS[metric].unit:
        case "B":
            return float(parse_bytes(value))
        case "s":
            return parse_seconds(value)
        case unit:
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise ValueError(f"{value!r} is not a number of {unit}")
            return finite(value)


class _Bounded(BaseModel):
    """Something said about a metric, with bounds in the metric's unit (or a text with a unit)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    metric: str
    min: FiniteFloat | None = None
    max: FiniteFloat | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_amounts(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("metric"), str):
            return data
        check_metric(data["metric"])
        bounds = {key: parse_amount(data[key], data["metric"]) for key in ("min", "max") if data.get(key) is not None}
        return data | bounds

    @model_validator(mode="after")
    def _check_order(self) -> "_Bounded":
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}, so nothing can hold it")
        return self


class Objective(_Bounded):
    """One thing to optimise; its direction is the metric's.

    Attributes:
        metric: A key of `METRICS`.
        weight: How much it counts, relative to the others, where one candidate has to be picked.
        min: Lower bound that a solution must keep, as a constraint does.
        max: Upper bound that a solution must keep, as a constraint does.
        description: Words for those who read the file.
    """

    name: str = Field(min_length=1)
    weight: FiniteFloat = Field(default=1.0, gt=0, le=1e9)
    description: str = ""

    @property
    def direction(self) -> Direction:
        """Which way is better."""
        return METRICS[self.metric].direction


class Constraint(_Bounded):
    """A bound on a metric that a solution must keep.

    Attributes:
        metric: A key of `METRICS`.
        min: Lower bound, in the metric's unit.
        max: Upper bound, in the metric's unit.
    """

    @model_validator(mode="after")
    def _check_bounds(self) -> "Constraint":
        if self.min is None and self.max is None:
            raise ValueError(f"{self.metric}: give a `min` or a `max`")
        return self


@dataclass(frozen=True, kw_only=True)
class Score:
    """The score of a trial.

    Attributes:
        values: One number for each objective, in order, as measured (Optuna knows the directions); None if one of
            them could not be measured, see `missing`.
        metrics: Every metric that the trial yields, objective or not.
        ci95: The 95 % interval of each of them.
        violations: For each bound by how much it is exceeded, as a share of the bound: 0 or less means that it is held.
            The keys are those of `bounds`, in every trial.
        missing: Objectives and bounded metrics that could not be measured, with the reason.
        censored: Metrics whose value is extrapolated.
    """

    values: tuple[float, ...] | None
    metrics: dict[str, float]
    ci95: dict[str, tuple[float, float]]
    violations: dict[str, float]
    missing: dict[str, str] = field(default_factory=dict)
    censored: tuple[str, ...] = ()

    @property
    def feasible(self) -> bool:
        """Whether every bound is held."""
        return all(violation <= 0 for violation in self.violations.values())


def bounds(objectives: Sequence[Objective], constraints: Sequence[Constraint]) -> dict[str, Bound]:
    """The bounds of a study by key (`peak_memory_bytes <= max`), each with the tightest amount given."""
    found: dict[str, Bound] = {}
    for said in (*objectives, *constraints):
        if said.min is not None:
            key = f"{said.metric} >= min"
            found[key] = (said.metric, "min", max(said.min, found[key][2]) if key in found else said.min)
        if said.max is not None:
            key = f"{said.metric} <= max"
            found[key] = (said.metric, "max", min(said.max, found[key][2]) if key in found else said.max)
    return found


def score(
    result: TrialResult,
    objectives: Sequence[Objective],
    constraints: Sequence[Constraint] = (),
    reference: Reference | None = None,
) -> Score:
    """Scores a trial against the objectives and bounds of a study.

    A metric that the trial does not yield is not made up: `values` is None and `missing` says why, and a bound on it
    counts as exceeded by its whole amount. `check_measurable` turns that into an error for the baseline, before a study
    spends its budget.
    """
    estimates = measure(result, reference)
    limits = bounds(objectives, constraints)
    wanted = dict.fromkeys(
        [objective.metric for objective in objectives] + [metric for metric, _, _ in limits.values()]
    )
    missing = {metric: _why_missing(metric, reference) for metric in wanted if metric not in estimates}
    complete = all(objective.metric in estimates for objective in objectives)
    return Score(
        values=tuple(estimates[objective.metric].value for objective in objectives) if complete else None,
        metrics={name: estimate.value for name, estimate in estimates.items()},
        ci95={name: (estimate.low, estimate.high) for name, estimate in estimates.items()},
        violations={key: _violation(estimates.get(bound[0]), bound) for key, bound in limits.items()},
        missing=missing,
        censored=tuple(name for name, estimate in estimates.items() if estimate.censored),
    )


def check_measurable(
    baseline: TrialResult,
    objectives: Sequence[Objective],
    constraints: Sequence[Constraint],
    reference: Reference | None,
) -> None:
    """Refuses a study whose objectives or bounds the baseline's (complete) trial does not yield."""
    found = score(baseline, objectives, constraints, reference)
    for metric, reason in found.missing.items():
        name = next((objective.name for objective in objectives if objective.metric == metric), None)
        what = f"objective {name!r}" if name else "constraint"
        raise UserError(f"{what}: {metric} cannot be measured on this target: {reason}")


def _why_missing(metric: str, reference: Reference | None) -> str:
    if metric == GOODPUT and reference is not None and not (reference.noise and reference.noise.compares):
        return reference.noise_problem
    if metric == "time_to_loss_s" and (reference is None or reference.problem):
        return reference.problem if reference else "there is no baseline to compare with"
    return METRICS[metric].why_missing


def _violation(estimate: Estimate | None, bound: Bound) -> float:
    return 1.0 if estimate is None else beyond(estimate.value, bound) / (abs(bound[2]) or 1.0)
