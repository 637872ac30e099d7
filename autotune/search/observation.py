"""A trial as the search sees it."""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.forecast.regression import interval_sd
from autotune.scoring.convergence.first_losses import ANOTHER_OBJECTIVE
from autotune.scoring.estimates import slowed
from autotune.scoring.quantiles import Z95
from autotune.scoring.shared_cores import SLOPE, SLOPE_SD, SPREAD
from autotune.space.candidate import Candidate
from autotune.space.rule import Setting
from autotune.trial.failures import ended_by_host
from autotune.trial.result import RAN, Outcome

# The system attribute of a told trial that holds its result, as JSON.
MEASURED_ATTR = "autotune:measured"
CENSORED_SD = 0.5  # of an extrapolated value's logarithm, and the most that an interval is taken to say
TIME_TO_LOSS_SD = 0.1  # of the logarithm of a time to a loss whose interval is not told


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A trial as the search sees it.

    Attributes:
        metrics: What it yielded, as in `objective.METRICS`.
        ci95: 95 % intervals, where they are known.
        censored: Metrics that are extrapolated.
        inner_s: Time of a micro-step that ends no optimizer step; with `boundary_s` it prices every accumulation.
        boundary_s: Time of the micro-step that ends one, the optimizer included.
        eligible: Whether it may become the answer: every setting was seen to act, its user can make it, and its loss is
            that of the baseline.
        log_slowdown: What other processes did to its step times (see `shared_cores`); None where that was not counted.
        load_sd: What its step time may be off by for that, as a standard deviation of the logarithm.
    """

    candidate: Candidate
    outcome: Outcome = Outcome.COMPLETE
    metrics: Mapping[str, float] = field(default_factory=dict)
    ci95: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    censored: Sequence[str] = ()
    inner_s: float | None = None
    boundary_s: float | None = None
    eligible: bool = True
    log_slowdown: float | None = None
    load_sd: float = 0.0

    def step_time_s(self, world_size: int) -> float | None:
        """Seconds of a step: told, or from the throughput."""
        if self.good("step_time_s"):
            return self.metrics["step_time_s"]
        if self.good("samples_per_s"):
            return self.candidate.global_batch_size(world_size) / self.metrics["samples_per_s"]
        return None

    def good(self, metric: str) -> bool:
        """Whether the metric is there and a logarithm can be taken of it."""
        value = self.metrics.get(metric)
        return value is not None and math.isfinite(value) and value > 0

    def own_noise(self) -> float:
        """Noise of the step time as the trial's own steps show it; 0 where no interval was told."""
        return interval_sd(*self.ci95["step_time_s"]) if "step_time_s" in self.ci95 else 0.0

    def time_to_loss_sd(self) -> float:
        """Standard deviation of the logarithm of the time to the target loss, as its interval shows it."""
        if "time_to_loss_s" in self.censored:
            return CENSORED_SD
        low, high = self.ci95.get("time_to_loss_s", (0.0, 0.0))
        if not (0 < low <= high < math.inf):
            return TIME_TO_LOSS_SD
        return min(max(math.log(high / low) / (2 * Z95), 0.01), CENSORED_SD)


@functools.lru_cache(maxsize=20_000)
def parsed(text: str) -> dict[str, Any]:
    """The result of a told trial, parsed once, since every step of a study reads every trial; callers must not change it."""
    data: dict[str, Any] = json.loads(text)
    return data


def observed(candidate: Candidate, data: Mapping[str, Any], setting: Setting) -> Observation:
    """A told trial as the search sees it.

    Args:
        data: What a study stores of its result.
    """
    inner, boundary = _micro_steps(data, candidate, setting.world_size)
    ci95 = {name: (float(low), float(high)) for name, (low, high) in data.get("ci95", {}).items()}
    return Observation(
        candidate=candidate, outcome=_outcome(data, setting), metrics=data["metrics"], ci95=ci95,
        censored=data.get("censored", ()), inner_s=inner, boundary_s=boundary,
        eligible=not (data.get("unwitnessed") or data.get("unreproducible"))
        and abs(data.get("loss_off", 0.0)) < ANOTHER_OBJECTIVE, log_slowdown=data.get("log_slowdown"),
    )  # fmt: skip


def as_usual(told: Sequence[Observation]) -> list[Observation]:
    """The trials with the times that they would have taken beside the usual load of their study by other processes."""
    found = [t.log_slowdown for t in told if t.outcome in RAN and t.log_slowdown is not None]
    if not any(found):
        return list(told)
    usual = sum(found) / len(found)
    return [_beside(t, t.log_slowdown, usual) if t.outcome in RAN and t.log_slowdown is not None else t for t in told]


def _beside(t: Observation, load: float, usual: float) -> Observation:
    apart = load - usual
    metrics, ci95 = slowed(t.metrics, t.ci95, -SLOPE * apart)
    doubt = math.hypot(SPREAD * load, SLOPE_SD * apart)
    inner, boundary = (time * math.exp(-SLOPE * apart) if time else time for time in (t.inner_s, t.boundary_s))
    return replace(t, metrics=metrics, ci95=ci95, inner_s=inner, boundary_s=boundary, load_sd=doubt)


def _outcome(data: Mapping[str, Any], setting: Setting) -> Outcome:
    """How a trial ended; where the host's memory ran out, that says nothing of the memory of an accelerator."""
    outcome, reason = Outcome(data["outcome"]), str(data.get("reason", ""))
    return Outcome.CRASHED if ended_by_host(outcome, reason, on_device=setting.accelerator != "cpu") else outcome


def _micro_steps(data: Mapping[str, Any], candidate: Candidate, world_size: int) -> tuple[float | None, float | None]:
    """Times of an inner and of a boundary micro-step: timed as such, or from one step taken apart (data, forward, backward, step).

    The latter only where micro-steps are alike up to the optimizer: at ZeRO stages 0 and 1 with several ranks the last
    backward also reduces the gradients, and its share is not known.
    """
    timed, phases = data.get("micro_step_s") or {}, data.get("phase_times_s") or {}
    if {"inner", "boundary"} <= timed.keys():
        return timed["inner"], timed["boundary"]
    if not {"forward", "backward", "step"} <= phases.keys() or (world_size > 1 and candidate.zero_stage < 2):
        return None, None
    # What a collective took is told apart from the phase that it lay in.
    inner = (
        sum(phases.get(name, 0.0) for name in ("script", "data", "forward", "backward", "recompute", "reduce"))
        / candidate.gradient_accumulation_steps
    )
    return inner, inner + phases["step"] + phases.get("gather", 0.0)
