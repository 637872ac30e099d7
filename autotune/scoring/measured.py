"""One trial as the analysis sees it, and how the metrics of two of them compare."""

import json
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from autotune.scoring.convergence.branch import Branch
from autotune.scoring.convergence.first_losses import ANOTHER_OBJECTIVE
from autotune.scoring.convergence.quality_gate import GateVerdict, numerics
from autotune.scoring.metrics import METRICS
from autotune.scoring.objective import Bound, Objective
from autotune.space.candidate import Candidate
from autotune.space.deepspeed import DsConfig
from autotune.trial.profile import Floats
from autotune.trial.result import Outcome

Value = TypeVar("Value", float, Floats)


def unseen(settings: Sequence[str]) -> str:
    """Says that nothing shows whether settings acted; empty without any."""
    return f"nothing shows whether {' and '.join(settings)} acted" if settings else ""


def set_apart(unwitnessed: Sequence[str], alone: Iterable[str]) -> str:
    """Returns why a complete trial cannot be recommended, whatever it measured; empty if it can.

    Args:
        unwitnessed: Settings of which nothing shows that they acted.
        alone: Changes that only a trial can make (the user has no way to) and that the baseline does not need.
    """
    if unwitnessed:
        return f"no pick, since {unseen(unwitnessed)}"
    return f"ranked apart, since only a trial can run it: {', '.join(found)}" if (found := list(alone)) else ""


class Foretold(NamedTuple):
    """A forecast of the logarithm of a trial's step time, by the study's model without the trial's own readings.

    Attributes:
        row: Its row of a factor of the covariance: that of two trials is the product of their rows.
    """

    mean: float
    row: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One trial as the analysis sees it.

    Attributes:
        ds_config: Its complete DeepSpeed configuration.
        metrics: By metric what it yielded, or after `estimates.estimate` the estimate from all measurements.
        ci95: The 95 % interval, within that one run or of the estimate.
        feasible: Whether all constraints are held; after `estimates.estimate` by the estimates.
        bounds: The constraints.
        repeats: Metrics of each re-measurement, by round; a round measures some finalists and the baseline in turn.
        forecast: What its study's model foretells of it.
        script_side_changes: What it takes besides the DeepSpeed JSON.
        unreproducible: Those of them that the user has no way to make.
        unfit: Why it, its worst batch, evaluation or a checkpoint did not fit when it was measured again; empty otherwise.
        failed_again: How it ended when it was measured again, where that failed; empty otherwise.
        unwitnessed: Settings of which nothing shows that they acted.
        numerics_kept: Whether it computes the same numbers as the baseline, but for the batch, or with fewer roundings.
        loss_micro_batch: Its micro-batch, where the study's loss depends on it; else 0.
        loss_off: Share by which its first losses lie off the baseline's on the same samples, or those of the study's trial
            with the largest one where its own are of other samples; 0 where that may be chance.
        verdict: What the quality gate said of it, where it was asked.
        branch: What a branch from the baseline's state showed, where there was one.
        branch_wanted: Its global batch is another one, which only a branch can justify.
        sitting: Pauses of the study before it was measured in which the machine may have changed.
        log_slowdown: By round, 0 for its first measurement, what other processes did to its step times (see `shared_cores`);
            without those of which that is not known.
    """

    trial: int
    candidate: Candidate
    ds_config: DsConfig
    outcome: Outcome
    metrics: Mapping[str, float]
    ci95: Mapping[str, tuple[float, float]]
    feasible: bool = True
    bounds: Sequence[Bound] = ()
    repeats: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    forecast: Foretold | None = None
    script_side_changes: Sequence[str] = ()
    unreproducible: Sequence[str] = ()
    unfit: str = ""
    failed_again: str = ""
    unwitnessed: Sequence[str] = ()
    numerics_kept: bool = True
    loss_micro_batch: int = 0
    loss_off: float = 0.0
    verdict: GateVerdict | None = None
    branch: Branch | None = None
    branch_wanted: bool = False
    sitting: int = 0
    log_slowdown: Mapping[int, float] = field(default_factory=dict)

    @property
    def doubt(self) -> str:
        """Why it must not be recommended although it is usable; empty if nothing is left open."""
        if self.unfit:
            return self.unfit
        if self.unwitnessed:
            return unseen(self.unwitnessed)
        if not self.numerics_kept and not (self.verdict is not None and self.verdict.passed):
            other = (
                "another micro-batch, on which the training depends,"
                if self.loss_micro_batch
                else "other numerics than the baseline's"
            )
            return (self.verdict and self.verdict.reason) or f"how it trains with {other} was not checked"
        if self.branch_wanted and not (self.branch is not None and self.branch.confirmed):
            return (self.branch and self.branch.reason) or "its global batch was not checked by a branch"
        return ""

    @property
    def barred(self) -> bool:
        """Whether it failed a check, so that no further one helps."""
        if self.unwitnessed or self.unfit or abs(self.loss_off) >= ANOTHER_OBJECTIVE:
            return True
        failed = self.verdict is not None and not self.verdict.passed and not self.numerics_kept
        return failed or (self.branch_wanted and self.branch is not None and not self.branch.confirmed)

    @property
    def refused(self) -> bool:
        """Whether it is barred, and not by a branch that could not decide."""
        return self.barred and not (self.branch is not None and self.branch.confirmed is None)

    @property
    def numerics(self) -> str:
        """What decides how it trains, but for the batch: its numerics, and what DeepSpeed does not get of them."""
        return json.dumps(
            [numerics(self.ds_config), self.candidate.other_numerics, self.loss_micro_batch], sort_keys=True
        )

    @property
    def training(self) -> tuple[Hashable, ...]:
        """Its global batch and its numerics: trials with equal ones need the same samples to a loss."""
        # DeepSpeed's stage 0 has its own optimizer.
        return self.candidate.samples_per_rank, self.numerics, self.numerics_kept or bool(self.candidate.zero_stage)

    @property
    def confirmed(self) -> bool:
        """Whether it was measured again."""
        return bool(self.repeats)

    @property
    def usable(self) -> bool:
        """Whether it completed and holds the constraints; `doubt` says what else may speak against it."""
        return self.outcome is Outcome.COMPLETE and self.feasible


def baseline_of(measured: Sequence[Measured]) -> Measured | None:
    """The baseline's measurements; None if its trial did not complete."""
    return next((m for m in measured if m.trial == 0 and m.outcome is Outcome.COMPLETE), None)


def log_gain(measured: Measured, reference: Measured, objectives: Sequence[Objective]) -> float:
    """Weighted mean over the objectives of the logarithm of the gain over a reference; above 0 is better."""
    return weighted_gain({o.metric: log_ratio(measured, reference, o.metric) for o in objectives}, objectives)


def weighted_gain(log_ratios: Mapping[str, float], objectives: Sequence[Objective]) -> float:
    """Weighted mean of log ratios by metric, signed so that more is better; over the objectives that have one, 0 without any."""
    known = [objective for objective in objectives if objective.metric in log_ratios]
    total = sum(objective.weight for objective in known)
    return sum(o.weight * improvement(log_ratios[o.metric], o.metric) for o in known) / total if known else 0.0


def log_ratio(measured: Measured, reference: Measured, metric: str) -> float:
    """Logarithm of a metric over the reference's; 0 where one of them lacks it."""
    own, other = measured.metrics.get(metric), reference.metrics.get(metric)
    return math.log(own / other) if own and other and own > 0 and other > 0 else 0.0


def improvement(log_value: Value, metric: str) -> Value:
    """The logarithm of a metric's ratio, signed so that more is better."""
    return -log_value if METRICS[metric].direction == "minimize" else log_value
