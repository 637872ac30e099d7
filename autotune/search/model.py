"""Beliefs about candidates, learned from trials: step time, memory, samples to the target, chance to fit.

Two functions are unknown, the logarithms of step time and of the samples to the target; memory is the third. Latency,
throughput and time to target follow from them exactly. Each is the prior times a residual that is learned
(`forecast.regression`). Goodput is throughput over what a useful sample costs in samples, (phi + B) / (phi + B0), which is
learned as the samples to the target are: both are linear in the batch.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy
from numpy.typing import NDArray

from autotune.forecast.features import FeatureTable
from autotune.forecast.regression import (
    MEMORY_NOISE,
    MEMORY_SMOOTH,
    OVER_LIMIT,
    STOPPED_SD,
    CalibratedGP,
    Data,
    Design,
    expected_noise,
    fit,
    probability_below,
)
from autotune.scoring.measured import improvement
from autotune.scoring.metrics import of_kind
from autotune.scoring.objective import Bound
from autotune.search.observation import Observation
from autotune.search.sample_counts import SampleCounts
from autotune.space.candidate import Candidate
from autotune.trial.profile import Floats
from autotune.trial.result import FAILURES, RAN, Outcome

Rows = NDArray[np.intp]

HINGE_AT, HINGE_SD, HINGE_SQUARE_SD, HINGE_END = 0.85, 2.0, 10.0, 0.3
# A value that followed from another accumulation's trial: besides that trial's noise, per doubling.
DERIVED_SD = 0.03
# Trials, the newest, that have rows of other accumulations beside their own: cost is cubic.
DERIVED_TRIALS = 50
# What the first trial alone reads beyond its forecast is laid to the machine as a whole, by this deviation of its scale: with the
# prior's own a twentieth of it each went to the levels of the baseline's knobs, and every other level seemed faster.
OPEN_SCALE = 2.0
# Above this deviation the prior has guessed the scale of the memory, and does not know it.
GUESSED_SCALE = 0.5
# What fits by a larger chance, needs less than this share of the memory and runs out of it does so for another reason than its size.
SURELY_FITS, ROOMY = 0.99, 0.5
STEP, MEMORY = "step_time_s", "peak_memory_bytes"
RATES, COUNTED, PER_SAMPLE = of_kind("rate"), of_kind("count"), of_kind("per_sample")
# Metrics with a model of their own, and those of which a larger batch alone makes less.
OWN, OF_A_SAMPLE = of_kind("per_step", "per_sample"), RATES | COUNTED | PER_SAMPLE


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Everything that one set of trials teaches; made by `learn`.

    Attributes:
        catalogue: The candidates, which rows are numbers of.
        shares: Weights of the objectives in the goal, which is the weighted mean of their costs.
        bounds: What a solution must keep.
        time: Log step time.
        memory: Log peak memory.
        samples: Samples to the target, and those that a useful one costs.
        limit: Log of the memory of a rank, where it is known.
        rows: The candidates that completed.
        n_ran: Trials that told a step time.
        known: All that need not be proposed again.
        distrust: For each setting of the catalogue how likely it is to fail otherwise than by memory.
        per_sample: By rate what of it a sample holds, as tokens.
        sized: Whether the memory is known well enough to pass candidates by: something fitted, or its bytes were
            counted.
    """

    catalogue: FeatureTable
    metrics: Sequence[str]
    shares: Floats
    world_size: int
    bounds: Sequence[Bound]
    time: CalibratedGP
    memory: CalibratedGP
    samples: SampleCounts
    extra: Mapping[str, CalibratedGP]
    limit: float | None
    rows: Rows
    n_ran: int
    known: frozenset[int]
    distrust: Floats
    per_sample: Mapping[str, float]
    sized: bool

    def completes(self, rows: Rows) -> Floats:
        """Probability that a candidate does not fail otherwise than by memory."""
        return np.asarray((1.0 - self.catalogue.settings[rows] * self.distrust).prod(axis=1), dtype=float)

    def fits(self, rows: Rows) -> Floats:
        """Probability that a candidate fits the memory."""
        if self.limit is None:
            return np.ones(len(rows))
        mean, sd = self.memory.predict(self.catalogue.memory.take(rows), noise=True)
        return probability_below(mean, sd, self.limit)

    def held(self, rows: Rows) -> Floats:
        """Probability that the bounds are held, which nobody knows before the first measurement."""
        chance = np.ones(len(rows))
        if not len(self.rows):
            return chance
        for metric, end, amount in self.bounds:
            if amount > 0:
                mean, sd = self.log(rows, metric)
                z = (math.log(amount) - mean) / sd
                chance = chance * scipy.special.ndtr(z if end == "max" else -z)
        return np.maximum(chance, 1e-6)  # a bound that nothing seems to keep must not end the search

    def _model(self, part: str) -> CalibratedGP:
        """The model of one of the `_parts` of a metric."""
        return self.samples.of(part) if part in COUNTED else {STEP: self.time, MEMORY: self.memory, **self.extra}[part]

    def design(self, part: str, rows: Rows, *, hinge: bool = True) -> Design:
        """Rows as that model takes them; without the `hinge` at the memory limit it is cheap for very many."""
        if part == MEMORY:
            return self.catalogue.memory.take(rows)
        if part in COUNTED:
            return self.catalogue.samples.take(rows)
        return time_design(self.catalogue, self.memory, self.limit if hinge else None, rows)

    def log(self, rows: Rows, metric: str, *, noise: bool = False) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the logarithm of a metric; with `noise` of what a trial would measure."""
        mean, sd = self.costs(rows, [metric], noise=noise)
        return math.log(self.per_sample.get(metric, 1.0)) - improvement(mean[:, 0], metric), sd[:, 0]

    def costs(self, rows: Rows, metrics: Sequence[str] | None = None, *, noise: bool = False) -> tuple[Floats, Floats]:
        """Means and standard deviations of the logarithms of metrics, signed so that less is better; a column each.

        Args:
            metrics: By default the objectives.
        """
        metrics = self.metrics if metrics is None else metrics
        # The samples that a trial counts have no noise but that of its step time.
        found = {
            part: self._model(part).predict(self.design(part, rows), noise=noise and part not in COUNTED)
            for part in _all_parts(metrics)
        }
        sds = [functools.reduce(np.hypot, [found[part][1] for part in _parts(m)]) for m in metrics]
        means = self._summed({part: mean for part, (mean, _) in found.items()}, rows, metrics)
        return np.column_stack(means), np.column_stack(sds)

    def _summed(self, found: Mapping[str, Floats], rows: Rows, metrics: Sequence[str]) -> list[Floats]:
        """Logarithms of the costs by each metric, from those of its parts."""
        log_batch = np.log(self.catalogue.batch[rows] * self.world_size)
        return [np.sum([found[part] for part in _parts(m)], axis=0) - log_batch * (m in OF_A_SAMPLE) for m in metrics]

    def sd_apart(self, rows: Rows, others: Rows) -> Floats:
        """Standard deviations of differences: a row for each of `rows`, a column for each of `others`, an entry an objective."""
        found = {
            part: self._model(part).sd_apart(self.design(part, rows), self.design(part, others))
            for part in _all_parts(self.metrics)
        }
        return np.stack([functools.reduce(np.hypot, [found[part] for part in _parts(m)]) for m in self.metrics], axis=2)

    def goal(self, rows: Rows) -> tuple[Floats, Floats]:
        """Weighted mean of the objectives' costs, and its standard deviation if they err together."""
        mean, sd = self.costs(rows)
        return mean @ self.shares, sd @ self.shares

    def draw_goal(self, rows: Rows, rng: np.random.Generator, n: int) -> Floats:
        """Joint draws of that mean: `n` rows, a column for each candidate."""
        found = {part: self._model(part).draw(self.design(part, rows), rng, n) for part in _all_parts(self.metrics)}
        drawn = self._summed(found, rows, self.metrics)
        return np.asarray(np.tensordot(self.shares, drawn, axes=1), dtype=float)

    def rough_costs(self, rows: Rows | None = None) -> Floats:
        """Expected costs of some candidates; of all of them without the smooth remainder, which is cheap."""
        close = rows is not None
        rows = np.arange(len(self.catalogue.batch)) if rows is None else rows
        found = {
            part: self._model(part).mean(self.design(part, rows, hinge=close), smooth=close)
            for part in _all_parts(self.metrics)
        }
        return np.column_stack(self._summed(found, rows, self.metrics))


@dataclass(frozen=True)
class Beliefs:
    """What is believed of candidates, one entry each."""

    model: CostModel
    rows: Rows

    def log(self, metric: str) -> tuple[Floats, Floats]:
        """Logarithm of a metric as a trial would measure it: mean and standard deviation."""
        return self.model.log(self.rows, metric, noise=True)

    @property
    def log_step_time(self) -> tuple[Floats, Floats]:
        """The same of the step time."""
        return self.log(STEP)

    @property
    def log_memory(self) -> tuple[Floats, Floats]:
        """The same of the peak memory."""
        return self.log(MEMORY)

    def log_count(self, metric: str) -> tuple[Floats, Floats]:
        """Logarithm of the samples that a metric counts."""
        model = self.model
        return model.samples.of(metric).predict(model.catalogue.samples.take(self.rows))

    def added(self, metric: str) -> Floats:
        """What step time or peak memory has beside the corrected terms of its forecast, as a logarithm.

        How near the memory limit a candidate is does not count: elsewhere that is another matter.
        """
        model = self.model.time if metric == STEP else self.model.memory
        return model.remainder(self.model.design(metric, self.rows, hinge=False))

    @property
    def fits(self) -> Floats:
        """Probability that it fits the memory; it may exclude a candidate where the model is `sized`."""
        return self.model.fits(self.rows)


def learn(
    catalogue: FeatureTable,
    metrics: Sequence[str],
    shares: Floats,
    world_size: int,
    limit: float | None,
    bounds: Sequence[Bound],
    told: Sequence[Observation],
) -> CostModel:
    """Fits the models to every trial; their candidates are in the catalogue."""
    memory, limit, odd = _learn_memory(catalogue, limit, told)
    time_sd = np.concatenate([catalogue.time_sd, [HINGE_SD, HINGE_SQUARE_SD]])
    ran = timed(told, world_size)
    if len(ran) == 1:
        time_sd[0] = max(time_sd[0], OPEN_SCALE)
    done = [t for t in ran if t.outcome is Outcome.COMPLETE]
    wanted = dict.fromkeys([*metrics, *(metric for metric, _, _ in bounds)])
    ratios = {
        rate: [t.metrics[rate] / t.metrics["samples_per_s"] for t in done if t.good(rate) and t.good("samples_per_s")]
        for rate in RATES
    }

    def extra(metric: str) -> CalibratedGP:
        """A metric that follows from no other, as a multiple of the predicted step time; its reciprocal where more is better."""
        some = [t for t in done if t.good(metric)]
        design = time_design(catalogue, memory, limit, rows := _rows(catalogue, some))
        wide = time_sd.copy()
        wide[0] = 30.0  # another unit altogether
        samples = catalogue.batch[rows] * world_size if metric in PER_SAMPLE else 1.0
        y = np.log(samples) - improvement(np.log([t.metrics[metric] for t in some]), metric)
        return fit(Data.of(design, y), wide, catalogue.time_spread)

    return CostModel(
        catalogue=catalogue,
        metrics=metrics,
        shares=shares,
        world_size=world_size,
        bounds=bounds,
        time=fit(
            _time_data(catalogue, memory, limit, world_size, ran),
            time_sd,
            catalogue.time_spread,
            expected_noise([t.own_noise() for t in ran]),
        ),
        memory=memory,
        samples=SampleCounts(catalogue, world_size, done),
        extra={metric: extra(metric) for metric in wanted if metric in OWN},
        limit=limit,
        rows=_rows(catalogue, [t for t in done if t.eligible]),
        n_ran=len(ran),
        known=frozenset(catalogue.row[t.candidate] for t in told if t.outcome is not Outcome.LOST),
        distrust=_distrust(catalogue, told, odd),
        per_sample={rate: float(np.median(some)) for rate, some in ratios.items() if some},
        sized=any(t.good("peak_memory_bytes") for t in ran) or bool(catalogue.memory_sd[0] < GUESSED_SCALE),
    )


def _parts(metric: str) -> tuple[str, ...]:
    """The quantities, each with a model, whose logarithms add up to that of a metric's cost, but for the batch."""
    if metric in COUNTED:  # samples, and the step time
        return metric, STEP
    return (STEP,) if metric in RATES else (metric,)


def _all_parts(metrics: Sequence[str]) -> list[str]:
    """Those of several metrics, each once, the step time last."""
    return sorted(dict.fromkeys(part for metric in metrics for part in _parts(metric)), key=lambda part: part == STEP)


def timed(told: Sequence[Observation], world_size: int) -> list[Observation]:
    """The trials that told a step time."""
    return [t for t in told if t.outcome in RAN and t.step_time_s(world_size) is not None]


def time_design(catalogue: FeatureTable, memory: CalibratedGP, limit: float | None, rows: Rows) -> Design:
    """The rows with a hinge above 85 % of the memory: allocators slow down before they fail."""
    design = catalogue.time.take(rows)
    over = np.zeros(len(rows))
    if limit is not None:
        share = np.exp(np.minimum(memory.mean(catalogue.memory.take(rows)) - limit, 1.0))
        over = np.clip(share - HINGE_AT, 0.0, HINGE_END)
    return replace(design, linear=np.column_stack([design.linear, over, over**2]))


def _rows(catalogue: FeatureTable, told: Sequence[Observation]) -> Rows:
    return np.array([catalogue.row[t.candidate] for t in told], dtype=np.intp)


def _learn_memory(
    catalogue: FeatureTable, limit: float | None, told: Sequence[Observation]
) -> tuple[CalibratedGP, float | None, list[Observation]]:
    """Returns the model, the limit, and what ran out of memory although all that ran foretold that it surely fits."""
    seen = [t for t in told if t.good("peak_memory_bytes") and t.outcome in RAN]
    out = [t for t in told if t.outcome is Outcome.OOM]
    y = [math.log(t.metrics["peak_memory_bytes"]) for t in seen]
    odd: list[Observation] = []
    if y and out:
        least, sd = _foretold(catalogue, seen, out, y)
        if limit is None:  # half way from the largest that ran to the least predicted of what did not
            limit = max(y) + max(0.05, 0.5 * (float(least.min()) - max(y)))
        else:
            surely = (probability_below(least, sd, limit) > SURELY_FITS) & (least < limit + math.log(ROOMY))
            odd = [t for t, other in zip(out, surely, strict=True) if other]
    out = [t for t in out if limit is not None and t not in odd]
    y += [(limit or 0.0) + math.log(OVER_LIMIT)] * len(out)
    data = Data.of(catalogue.memory.take(_rows(catalogue, [*seen, *out])), y, n_censored=len(out))
    return fit(data, catalogue.memory_sd, catalogue.memory_spread, MEMORY_NOISE, MEMORY_SMOOTH), limit, odd


def _foretold(
    catalogue: FeatureTable, seen: Sequence[Observation], out: Sequence[Observation], y: Sequence[float]
) -> tuple[Floats, Floats]:
    """What trials that told their memory foretell of the logarithm of that of others: mean and standard deviation."""
    data = Data.of(catalogue.memory.take(_rows(catalogue, seen)), y)
    model = fit(data, catalogue.memory_sd, catalogue.memory_spread, MEMORY_NOISE, MEMORY_SMOOTH)
    return model.predict(catalogue.memory.take(_rows(catalogue, out)), noise=True)


def _time_data(
    catalogue: FeatureTable, memory: CalibratedGP, limit: float | None, world_size: int, ran: Sequence[Observation]
) -> Data | None:
    rows, y, group, extra = [], [], [], []
    for n, t in enumerate(ran):
        derive = n >= len(ran) - DERIVED_TRIALS
        stopped = STOPPED_SD if t.outcome is Outcome.STOPPED_EARLY else 0.0
        own = math.hypot(t.own_noise(), t.load_sd)
        for candidate, seconds, sd in _priced(catalogue, t, world_size, derive=derive):
            row = catalogue.row.get(candidate)
            if row is not None and seconds > 0:
                rows.append(row)
                y.append(math.log(seconds))
                group.append(n)
                extra.append(math.hypot(sd, stopped, own))
    if not rows:
        return None
    return Data(
        design=time_design(catalogue, memory, limit, np.array(rows, dtype=np.intp)), y=np.array(y), group=np.array(group),
        extra_sd=np.array(extra), censored=np.zeros(len(rows), dtype=bool),
    )  # fmt: skip


def _priced(
    catalogue: FeatureTable, t: Observation, world_size: int, *, derive: bool
) -> list[tuple[Candidate, float, float]]:
    """The step times that a trial tells: its own, and t(K) = (K - 1) t_inner + t_boundary for other accumulations.

    Two of these say it all, since two numbers are behind them: the ends of what is tuned.
    """
    seconds = t.step_time_s(world_size)
    assert seconds is not None
    own = [(t.candidate, seconds, 0.0)]
    if not derive or t.inner_s is None or t.boundary_s is None or not (t.inner_s > 0 and t.boundary_s > 0):
        return own
    steps = t.candidate.gradient_accumulation_steps
    scale = seconds / ((steps - 1) * t.inner_s + t.boundary_s)
    others = [
        k
        for k in catalogue.accumulations
        if k != steps and replace(t.candidate, gradient_accumulation_steps=k) in catalogue.row
    ]
    lowest, highest = min(others, default=steps), max(others, default=steps)
    for other in [lowest] * (lowest < steps) + [highest] * (highest > steps):
        distance = abs(math.log2(other / steps))
        derived = scale * ((other - 1) * t.inner_s + t.boundary_s)
        own.append((replace(t.candidate, gradient_accumulation_steps=other), derived, DERIVED_SD * distance))
    return own


def _distrust(catalogue: FeatureTable, told: Sequence[Observation], odd: Sequence[Observation]) -> Floats:
    """For each setting how likely it is to fail otherwise than by memory: what crashes once, or can be no answer, may do so again.

    So may what ran out of memory and surely fits (`odd`). The settings of a trial that no other has shown to run share its blame.
    """
    failures = [*odd, *(t for t in told if t.outcome in FAILURES or (t.outcome in RAN and not t.eligible))]
    failed = catalogue.settings[_rows(catalogue, failures)]
    failed[[t.outcome in RAN for t in failures], catalogue.present.shape[1] :] = 0.0  # no size makes it train otherwise
    good = catalogue.settings[_rows(catalogue, [t for t in told if t.outcome in RAN and t.eligible])].sum(axis=0)
    suspects = np.where((failed * (good == 0)).any(axis=1, keepdims=True), failed * (good == 0), failed)
    of_knob = suspects @ catalogue.setting_of  # the knobs share alike, however many columns each has
    shared = (of_knob @ catalogue.setting_of.T) * (of_knob > 0).sum(axis=1, keepdims=True)
    bad = (suspects / np.maximum(shared, 1.0)).sum(axis=0)
    return np.asarray(bad / (bad + good + 0.25) * (good < bad), dtype=float)
