"""The search itself, without a study: candidates, a prior and what was measured in; the next candidate and the best one out.

It needs no workload, no DeepSpeed and no Optuna, so it can be tried on any table of candidates:

    from autotune.search.catalogue import flat, from_logs
    from autotune.search.guide import Guide, Told

    candidates = [Candidate(micro_batch_size=b, zero_stage=z) for b in (1, 2, 4, 8) for z in (0, 1, 2, 3)]
    prior = lambda some: from_logs(log_step_time=[...], log_memory=[...])     # or `flat`; or search.physics.AnalyticPrior
    guide = Guide(candidates, prior, metrics=["step_time_s", "samples_per_s"], memory_limit_bytes=8e9)
    told = []
    while (candidate := guide.suggest(told)) is not None and len(told) < 30:
        told.append(Told(candidate=candidate, metrics={"step_time_s": ..., "samples_per_s": ..., "peak_memory_bytes": ...}))
        # one that ran out of memory:  Told(candidate=candidate, outcome=Outcome.OOM)
    guide.best(told)                       # by posterior mean, for each metric
    guide.beliefs(told, candidates)        # step time, memory, probability that it fits

Two functions are unknown, the logarithms of step time and of the samples to the target; memory is the third. Latency,
throughput and time to target follow from them exactly. Each is the prior times a residual that is learned (`residual.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from autotune.candidate import Candidate, Scalar
from autotune.objective import METRICS
from autotune.search import acquisition
from autotune.search.catalogue import Catalogue, Prior
from autotune.search.residual import Data, Design, Posterior, fit, probability_below
from autotune.trial import Outcome

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]
Bound = tuple[str, Literal["min", "max"], float]

COVERING_TRIALS = 8
# A level is worth a look if its best candidate is predicted to be within this factor of the best on some objective.
WORTH_A_LOOK = 2.5
NEW_LEVEL_GAIN = 0.35
FIRST_FITS, LEAST_FITS = 0.9, 0.02
# What ran out of memory needed at least so much more than there is.
OVER_LIMIT = 1.02
HINGE_AT, HINGE_SD, HINGE_SQUARE_SD, HINGE_END = 0.85, 0.7, 3.0, 0.3
TOP, WEIGHTINGS, RANDOM_ROWS = 120, 10, 600
# A value that followed from another accumulation's trial: besides that trial's noise, per doubling.
DERIVED_SD = 0.02
CENSORED_SD, SAMPLES_SD, MEMORY_SD = 0.5, 0.1, 0.0
RATES = {"samples_per_s", "tokens_per_s"}


@dataclass(frozen=True, kw_only=True)
class Told:
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


@dataclass(frozen=True, kw_only=True)
class Beliefs:
    """What is believed of candidates, one entry each.

    Attributes:
        log_step_time: Expected logarithm of the step time, as (mean, standard deviation).
        log_memory: The same for the peak memory.
        fits: Probability that it fits.
    """

    log_step_time: tuple[Floats, Floats]
    log_memory: tuple[Floats, Floats]
    fits: Floats


@dataclass(frozen=True)
class _State:
    """Everything that one set of trials teaches."""

    time: Posterior
    memory: Posterior
    samples: Posterior
    extra: dict[str, Posterior]
    limit: float | None
    rows: Rows
    known: frozenset[int]
    distrust: Floats
    tokens: float


class Guide:
    """Proposes the next of a set of candidates.

    Args:
        candidates: What may be proposed, all of it legal; `add` takes more.
        prior: Predicts step time and memory; `catalogue.flat` for none.
        metrics: The objectives, as in `objective.METRICS`, in order.
        world_size: Ranks.
        memory_limit_bytes: What a rank may use; None if that is not known.
        bounds: Bounds on metrics that a solution must keep (metric, which end, amount).
        reference: The candidate whose batch is the origin; by default the first.
        knobs: The values of each knob, where `candidates` does not hold all that will be added.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        prior: Prior,
        metrics: Sequence[str],
        *,
        world_size: int = 1,
        memory_limit_bytes: float | None = None,
        bounds: Iterable[Bound] = (),
        reference: Candidate | None = None,
        knobs: Mapping[str, Sequence[Scalar]] | None = None,
    ) -> None:
        self.metrics, self.world_size, self.bounds = list(metrics), world_size, list(bounds)
        self.limit = math.log(memory_limit_bytes) if memory_limit_bytes else None
        reference = reference or (candidates[0] if candidates else Candidate(micro_batch_size=1))
        self.catalogue = Catalogue(knobs if knobs is not None else knobs_of(candidates), reference, prior)
        self.catalogue.add([reference, *candidates])
        offered = set(candidates)
        self._offered = np.array([c in offered for c in self.catalogue.candidates], dtype=bool)

    def add(self, candidates: Sequence[Candidate]) -> None:
        """More candidates to choose from; those that are there stay."""
        self.catalogue.add(candidates)
        offered = np.zeros(len(self.catalogue.candidates), dtype=bool)
        offered[: len(self._offered)] = self._offered
        offered[[self.catalogue.row[c] for c in candidates]] = True
        self._offered = offered

    def suggest(self, told: Sequence[Told], busy: Sequence[Candidate] = ()) -> Candidate | None:
        """The next candidate: new, and likely to fit; None if there is none.

        Args:
            told: Every trial so far, in order.
            busy: Candidates under trial now, or not to be proposed for another reason.
        """
        state = self._learn(told)
        taken = state.known | {self.catalogue.row[c] for c in busy if c in self.catalogue.row}
        open_rows = self._offered.copy()
        open_rows[list(taken)] = False
        if not open_rows.any():
            return None
        rng = np.random.default_rng(len(told))
        rows = self._pool(state, open_rows, rng)
        fits = self._fits(state, rows)
        if not (fits >= LEAST_FITS).any():
            # The pool is a choice by means; nothing of it fits, so look at everything once.
            rows = np.flatnonzero(open_rows)
            fits = np.concatenate([self._fits(state, part) for part in _parts(rows)])
        rows, fits = rows[fits >= LEAST_FITS], fits[fits >= LEAST_FITS]
        if not len(rows):
            return None
        allowed = fits * self._held(state, rows) * self._completes(state, rows)
        covering = self._covering(state, rows, allowed) if len(told) < COVERING_TRIALS else None
        if covering is None:
            scores = self._worth(state, rows, len(told), rng) * allowed
            # Where nothing promises an improvement, what is most likely to fit and fast is next.
            covering = int(np.argmax(scores)) if scores.max() > 0 else int(np.argmax(allowed - 1e-3 * self._regret(state, rows)))
        chosen: Candidate = self.catalogue.candidates[int(rows[covering])]
        return chosen

    def beliefs(self, told: Sequence[Told], candidates: Sequence[Candidate]) -> Beliefs:
        """What the trials so far let one expect of candidates."""
        self.catalogue.add([*candidates, *(t.candidate for t in told)])
        self._offered = np.concatenate([self._offered, np.zeros(len(self.catalogue.candidates) - len(self._offered), dtype=bool)])
        state = self._learn(told)
        rows = np.array([self.catalogue.row[c] for c in candidates], dtype=np.intp)
        time = state.time.predict(self._time_design(state, rows))
        memory = state.memory.predict(self.catalogue.memory.take(rows))
        return Beliefs(log_step_time=time, log_memory=memory, fits=self._fits(state, rows))

    def best(self, told: Sequence[Told]) -> dict[str, Candidate]:
        """For each objective the measured candidate with the best posterior mean: one lucky measurement does not decide."""
        state = self._learn(told)
        done = self._done(told)
        if not done:
            return {}
        rows = np.array([self.catalogue.row[t.candidate] for t in done], dtype=np.intp)
        mean, _ = self._costs(state, rows)
        return {metric: done[int(np.argmin(mean[:, n]))].candidate for n, metric in enumerate(self.metrics)}

    def expected_gain(self, told: Sequence[Told]) -> dict[str, float]:
        """For each objective the largest expected improvement that is left, as a share of the best."""
        state = self._learn(told)
        done = self._done(told)
        open_rows = self._offered.copy()
        open_rows[list(state.known)] = False
        if not done or not open_rows.any():
            return dict.fromkeys(self.metrics, 0.0 if done else math.inf)
        rows = self._pool(state, open_rows, np.random.default_rng(len(told)))
        allowed = self._fits(state, rows) * self._held(state, rows)
        mean, sd = self._costs(state, rows)
        best, _ = self._costs(state, np.array([self.catalogue.row[t.candidate] for t in done], dtype=np.intp))
        gains = (
            float((acquisition.expected_improvement(mean[:, n], sd[:, n], best[:, n].min()) * allowed).max()) for n in range(len(best[0]))
        )
        return dict(zip(self.metrics, gains, strict=True))

    # Learning

    def _done(self, told: Sequence[Told]) -> list[Told]:
        return [t for t in told if t.outcome is Outcome.COMPLETE and _step_time(t, self.world_size) is not None]

    def _learn(self, told: Sequence[Told]) -> _State:
        catalogue = self.catalogue
        new = [t.candidate for t in told if t.candidate not in catalogue.row]
        if new:
            catalogue.add(new)
            self._offered = np.concatenate([self._offered, np.zeros(len(catalogue.candidates) - len(self._offered), dtype=bool)])
        memory, limit = self._learn_memory(told)
        time_sd = np.concatenate([catalogue.linear_sd, [HINGE_SD, HINGE_SQUARE_SD]])
        blank = Posterior(time_sd, catalogue.time_spread)
        empty = np.zeros(0, dtype=np.intp)
        state = _State(blank, memory, blank, {}, limit, empty, frozenset(), np.zeros(catalogue.present.shape[1]), 1.0)
        done = self._done(told)
        time = fit(self._time_data(state, done), time_sd, catalogue.time_spread)
        extra = {metric: self._learn_extra(state, done, metric, time_sd) for metric in self._extra_metrics()}
        rows = np.array([catalogue.row[t.candidate] for t in done], dtype=np.intp)
        known = frozenset(catalogue.row[t.candidate] for t in told if t.outcome is not Outcome.LOST)
        ratios = [
            t.metrics["tokens_per_s"] / t.metrics["samples_per_s"] for t in done if _good(t, "tokens_per_s") and _good(t, "samples_per_s")
        ]
        return replace(
            state, time=time, samples=self._learn_samples(done), extra=extra, rows=rows, known=known,
            distrust=self._distrust(told), tokens=float(np.median(ratios)) if ratios else 1.0,
        )  # fmt: skip

    def _extra_metrics(self) -> list[str]:
        wanted = [*self.metrics, *(metric for metric, _, _ in self.bounds)]
        return [m for m in dict.fromkeys(wanted) if m not in RATES and m not in ("step_time_s", "time_to_loss_s", "peak_memory_bytes")]

    def _learn_memory(self, told: Sequence[Told]) -> tuple[Posterior, float | None]:
        catalogue = self.catalogue
        seen = [t for t in told if _good(t, "peak_memory_bytes") and t.outcome is Outcome.COMPLETE]
        out = [t for t in told if t.outcome is Outcome.OOM]
        y = [math.log(t.metrics["peak_memory_bytes"]) for t in seen]
        limit = self.limit
        if limit is None and out:
            # Nobody said how much there is: more than anything that ran, and less than what did not.
            limit = max(y) + 0.05 if y else None
        if limit is None:
            out = []
        y += [(limit or 0.0) + math.log(OVER_LIMIT)] * len(out)
        rows = np.array([catalogue.row[t.candidate] for t in [*seen, *out]], dtype=np.intp)
        data = Data(
            design=catalogue.memory.take(rows),
            y=np.array(y),
            group=np.arange(len(rows)),
            extra_sd=np.full(len(rows), MEMORY_SD),
            censored=np.arange(len(rows)) >= len(seen),
        )
        return fit(data, catalogue.memory_sd, catalogue.memory_spread), limit

    def _time_design(self, state: _State, rows: Rows) -> Design:
        """The rows with a hinge above 85 % of the memory: allocators slow down before they fail."""
        design = self.catalogue.time.take(rows)
        over = np.zeros(len(rows))
        if state.limit is not None:
            share = np.exp(np.minimum(state.memory.mean(self.catalogue.memory.take(rows)) - state.limit, 1.0))
            over = np.clip(share - HINGE_AT, 0.0, HINGE_END)
        return replace(design, linear=np.column_stack([design.linear, over, over**2]))

    def _time_data(self, state: _State, done: Sequence[Told]) -> Data | None:
        rows, y, group, extra = [], [], [], []
        for n, t in enumerate(done):
            for candidate, seconds, sd in self._priced(t):
                row = self.catalogue.row.get(candidate)
                if row is not None and seconds > 0:
                    rows.append(row)
                    y.append(math.log(seconds))
                    group.append(n)
                    extra.append(sd)
        if not rows:
            return None
        index = np.array(rows, dtype=np.intp)
        return Data(
            design=self._time_design(state, index), y=np.array(y), group=np.array(group), extra_sd=np.array(extra),
            censored=np.zeros(len(rows), dtype=bool),
        )  # fmt: skip

    def _priced(self, t: Told) -> list[tuple[Candidate, float, float]]:
        """The step times that a trial tells: its own, and t(K) = (K - 1) t_inner + t_boundary for other accumulations."""
        seconds = _step_time(t, self.world_size)
        assert seconds is not None
        own = [(t.candidate, seconds, 0.0)]
        if t.inner_s is None or t.boundary_s is None or not (t.inner_s > 0 and t.boundary_s > 0):
            return own
        steps = t.candidate.gradient_accumulation_steps
        scale = seconds / ((steps - 1) * t.inner_s + t.boundary_s)
        for other in sorted(self.catalogue.accumulations - {steps}):
            distance = abs(math.log2(other / steps))
            derived = scale * ((other - 1) * t.inner_s + t.boundary_s)
            own.append((replace(t.candidate, gradient_accumulation_steps=other), derived, DERIVED_SD * distance))
        return own

    def _learn_samples(self, done: Sequence[Told]) -> Posterior:
        """Samples to the target against the global batch."""
        catalogue = self.catalogue
        some = [t for t in done if _good(t, "time_to_loss_s")]
        rows = np.array([catalogue.row[t.candidate] for t in some], dtype=np.intp)
        y, extra = [], []
        for t in some:
            seconds = _step_time(t, self.world_size)
            assert seconds is not None
            y.append(math.log(t.metrics["time_to_loss_s"] / seconds * t.candidate.global_batch_size(self.world_size)))
            extra.append(CENSORED_SD if "time_to_loss_s" in t.censored else _spread(t, "time_to_loss_s", SAMPLES_SD))
        data = Data(
            design=catalogue.samples.take(rows), y=np.array(y), group=np.arange(len(rows)), extra_sd=np.array(extra),
            censored=np.zeros(len(rows), dtype=bool),
        )  # fmt: skip
        return fit(data, catalogue.samples_sd, np.array([4.0, 4.0]))

    def _learn_extra(self, state: _State, done: Sequence[Told], metric: str, sd: Floats) -> Posterior:
        """Another metric, as a multiple of the predicted step time."""
        some = [t for t in done if _good(t, metric)]
        rows = np.array([self.catalogue.row[t.candidate] for t in some], dtype=np.intp)
        data = Data(
            design=self._time_design(state, rows), y=np.array([math.log(t.metrics[metric]) for t in some]), group=np.arange(len(rows)),
            extra_sd=np.zeros(len(rows)), censored=np.zeros(len(rows), dtype=bool),
        )  # fmt: skip
        wide = sd.copy()
        wide[0] = 30.0  # another unit altogether
        return fit(data, wide, self.catalogue.time_spread)

    def _distrust(self, told: Sequence[Told]) -> Floats:
        """For each level how likely it is to fail otherwise than by memory: what crashes once, may do so again."""
        fatal = {Outcome.CRASHED, Outcome.TIMEOUT, Outcome.NOT_APPLIED, Outcome.DIVERGED}
        bad, good = (np.zeros(self.catalogue.present.shape[1]) for _ in range(2))
        for t in told:
            present = self.catalogue.present[self.catalogue.row[t.candidate]]
            bad += present * (t.outcome in fatal)
            good += present * (t.outcome is Outcome.COMPLETE)
        return np.asarray(bad / (bad + good + 0.25) * (good < bad), dtype=float)

    # Judging

    def _completes(self, state: _State, rows: Rows) -> Floats:
        if not self.catalogue.present.shape[1]:
            return np.ones(len(rows))
        return np.asarray(1.0 - (self.catalogue.present[rows] * state.distrust).max(axis=1), dtype=float)

    def _fits(self, state: _State, rows: Rows) -> Floats:
        if state.limit is None:
            return np.ones(len(rows))
        mean, sd = state.memory.predict(self.catalogue.memory.take(rows))
        return probability_below(mean, sd, state.limit)

    def _held(self, state: _State, rows: Rows) -> Floats:
        """Probability that the bounds are held, which nobody knows before the first measurement."""
        chance = np.ones(len(rows))
        if not len(state.rows):
            return chance
        for metric, end, amount in self.bounds:
            if amount <= 0:
                continue
            mean, sd = self._cost(state, rows, metric)
            sign = _sign(metric)
            limit = sign * (math.log(amount) - (math.log(state.tokens) if metric == "tokens_per_s" else 0.0))
            below = (end == "max") == (sign > 0)
            z = (limit - mean) / sd
            chance = chance * ndtr(z if below else -z)
        return np.maximum(chance, 1e-6)  # a bound that nothing seems to keep must not end the search

    def _cost(self, state: _State, rows: Rows, metric: str) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the logarithm of a metric, signed so that less is better."""
        log_batch = np.log(self.catalogue.batch[rows] * self.world_size)
        if metric == "peak_memory_bytes":
            return state.memory.predict(self.catalogue.memory.take(rows))
        design = self._time_design(state, rows)
        if metric in state.extra:
            mean, sd = state.extra[metric].predict(design)
            return _sign(metric) * mean, sd
        mean, sd = state.time.predict(design)
        if metric in RATES:
            return mean - log_batch, sd
        if metric == "time_to_loss_s":
            more, also = state.samples.predict(self.catalogue.samples.take(rows))
            return mean + more - log_batch, np.hypot(sd, also)
        return mean, sd

    def _costs(self, state: _State, rows: Rows) -> tuple[Floats, Floats]:
        pairs = [self._cost(state, rows, metric) for metric in self.metrics]
        return np.column_stack([mean for mean, _ in pairs]), np.column_stack([sd for _, sd in pairs])

    def _rough_costs(self, state: _State) -> Floats:
        """Costs of all candidates without the smooth remainder."""
        catalogue = self.catalogue
        log_batch = np.log(catalogue.batch * self.world_size)
        time = state.time.mean(replace(catalogue.time, linear=np.column_stack([catalogue.time.linear, np.zeros((len(log_batch), 2))])))
        columns = []
        for metric in self.metrics:
            if metric == "peak_memory_bytes":
                columns.append(state.memory.mean(catalogue.memory))
            elif metric in RATES:
                columns.append(time - log_batch)
            elif metric == "time_to_loss_s":
                columns.append(time + state.samples.mean(catalogue.samples) - log_batch)
            else:
                columns.append(time * (_sign(metric) if metric in state.extra else 1.0))
        return np.column_stack(columns)

    # Choosing

    def _pool(self, state: _State, open_rows: NDArray[np.bool_], rng: np.random.Generator) -> Rows:
        """The rows to look at closely: near-optimal for several weightings, the best of each level, and random ones."""
        rows = np.flatnonzero(open_rows)
        if len(rows) <= TOP * 12:
            return rows
        costs = self._rough_costs(state)[rows]
        if state.limit is not None:
            over = state.memory.mean(self.catalogue.memory)[rows] - state.limit
            costs = costs + 10.0 * np.clip(over - 0.1, 0.0, 1.0)[:, None]
        spread = costs.std(axis=0) + 1e-9
        scaled = (costs - costs.min(axis=0)) / spread
        weights = np.vstack([np.eye(costs.shape[1]), rng.dirichlet(np.ones(costs.shape[1]), WEIGHTINGS)])
        chosen = [np.argpartition(scaled @ weight, TOP)[:TOP] for weight in weights]
        chosen.append(rng.integers(0, len(rows), RANDOM_ROWS))
        lead = scaled.min(axis=1)
        present = self.catalogue.present[rows]
        chosen += [best for column in range(present.shape[1]) if len(best := _lowest(lead, present[:, column] > 0, 6))]
        return rows[np.unique(np.concatenate(chosen))]

    def _regret(self, state: _State, rows: Rows) -> Floats:
        """How far each row is expected to be from the best, on the objective that it serves best."""
        mean, _ = self._costs(state, rows)
        return np.asarray((mean - mean.min(axis=0)).min(axis=1), dtype=float)

    def _covering(self, state: _State, rows: Rows, allowed: Floats) -> int | None:
        """Among the first trials: a good candidate with promising levels that no trial has had; None if all were seen."""
        present = self.catalogue.present
        seen = present[list(state.known)].any(axis=0) if state.known else np.zeros(present.shape[1], dtype=bool)
        regret = self._regret(state, rows)
        safe = allowed >= min(FIRST_FITS, float(allowed.max()))
        here = present[rows] > 0
        best = np.array([regret[safe & here[:, n]].min(initial=math.inf) for n in range(present.shape[1])])
        new = ~seen & (best <= math.log(WORTH_A_LOOK))
        if state.known and not new.any():
            return None
        score = np.where(safe, NEW_LEVEL_GAIN * here[:, new].sum(axis=1) - regret, -math.inf)
        return int(np.argmax(score))

    def _worth(self, state: _State, rows: Rows, n_told: int, rng: np.random.Generator) -> Floats:
        """The acquisition whose turn it is: the hypervolume, then one objective, then the hypervolume again, and so on."""
        mean, sd = self._costs(state, rows)
        if not len(state.rows):
            return np.exp(-self._regret(state, rows))
        held = state.rows[self._held(state, state.rows) > 0.5]
        if not len(held):
            return self._held(state, rows)
        seen, _ = self._costs(state, held)
        n_metrics = len(self.metrics)
        turn = n_told % (2 * n_metrics)
        if n_metrics == 1 or turn % 2 == 1:
            column = turn // 2 if n_metrics > 1 else 0
            return acquisition.expected_improvement(mean[:, column], sd[:, column], seen[:, column].min())
        gain = acquisition.hypervolume_improvement(mean, sd, seen[acquisition.front_of(seen)], rng)
        return gain if gain.max() > 0 else acquisition.expected_improvement(mean[:, 0], sd[:, 0], seen[:, 0].min())


def knobs_of(candidates: Sequence[Candidate]) -> dict[str, list[Any]]:
    """Every knob that differs between candidates, with its values."""
    found: dict[str, dict[str, Any]] = {}
    for candidate in candidates:
        for name, value in candidate.values().items():
            found.setdefault(name, {}).setdefault(repr(value), value)
    absent = {name for name in found if "." in name}
    return {name: list(values.values()) for name, values in found.items() if len(values) > 1 or name in absent}


def _step_time(t: Told, world_size: int) -> float | None:
    """Seconds of a step: told, or from the throughput."""
    if _good(t, "step_time_s"):
        return t.metrics["step_time_s"]
    if _good(t, "samples_per_s"):
        return t.candidate.global_batch_size(world_size) / t.metrics["samples_per_s"]
    return None


def _good(t: Told, metric: str) -> bool:
    value = t.metrics.get(metric)
    return value is not None and math.isfinite(value) and value > 0


def _spread(t: Told, metric: str, otherwise: float) -> float:
    low, high = t.ci95.get(metric, (0.0, 0.0))
    if not (0 < low <= high < math.inf):
        return otherwise
    return float(np.clip(math.log(high / low) / 3.92, 0.01, CENSORED_SD))


def _sign(metric: str) -> float:
    return -1.0 if metric in METRICS and METRICS[metric].direction == "maximize" else 1.0


def _lowest(values: Floats, where: NDArray[np.bool_], n: int) -> Rows:
    rows = np.flatnonzero(where)
    return rows if len(rows) <= n else rows[np.argpartition(values[rows], n)[:n]]


def _parts(rows: Rows, size: int = 4000) -> list[Rows]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]
