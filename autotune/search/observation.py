"""A trial as the search sees it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autotune.forecast.regression import Z95, interval_sd
from autotune.space.candidate import Candidate
from autotune.trial.result import Outcome

CENSORED_SD = 0.5  # of an extrapolated value's logarithm, and the most that an interval is taken to say


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A trial as the search sees it.

    Attributes:
        candidate: What was measured.
        outcome: How it ended.
        metrics: What it yielded, as in `objective.METRICS`.
        ci95: 95 % intervals, where they are known.
        censored: Metrics that are extrapolated.
        inner_s: Time of a micro-step that ends no optimizer step; with `boundary_s` it prices every accumulation.
        boundary_s: Time of the micro-step that ends one, the optimizer included.
    """

    candidate: Candidate
    outcome: Outcome = Outcome.COMPLETE
    metrics: Mapping[str, float] = field(default_factory=dict)
    ci95: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    censored: Sequence[str] = ()
    inner_s: float | None = None
    boundary_s: float | None = None

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

    def spread(self, metric: str, otherwise: float) -> float:
        """Standard deviation of a metric's logarithm by its interval; `otherwise` where none was told."""
        low, high = self.ci95.get(metric, (0.0, 0.0))
        if not (0 < low <= high < math.inf):
            return otherwise
        return min(max(math.log(high / low) / (2 * Z95), 0.01), CENSORED_SD)
