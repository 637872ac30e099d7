"""Forecasts with intervals: the formulas' terms, each scaled by what was measured, and how sure the sum is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.forecast import memory as memory_formulas
from autotune.forecast import step_time as step_time_module
from autotune.forecast.knobs import Knobs
from autotune.forecast.step_time import step_time_terms
from autotune.space.candidate import Candidate
from autotune.space.deepspeed import DsConfig
from autotune.space.legality import Setting
from autotune.trial.profile import Floats, Machine, Profile

Formula = Callable[[Knobs, Profile, Machine], Mapping[str, Floats]]
# Standard normal quantile of a two-sided 90 % interval.
Z90 = 1.645
ITERATIONS = 12
# How far a single measurement scatters, and how far all terms together may be off before anything was measured.
MEMORY_NOISE, TIME_NOISE = 0.05, 0.15
MEMORY_SCALE, TIME_SCALE = 0.03, 0.35
GUESSED_MEMORY_SCALE, GUESSED_TIME_SCALE = 0.7, 1.0
# Leave-one-out errors count as much as this many that agree with the stated spreads.
PRIOR_ERRORS = 10.0
WIDEST, MOST_LEFT_OUT = 4.0, 20


@dataclass(frozen=True, kw_only=True)
class Term:
    """One part of a forecast.

    Attributes:
        name: What it is.
        value: Bytes or seconds.
        low: Lower end of its 90 % interval.
        high: Upper end.
    """

    name: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A forecast of one candidate, taken apart.

    Attributes:
        terms: Its parts, which add up to the total.
        total: The total with its interval.
        n_measured: Measurements that corrected it.
    """

    terms: list[Term]
    total: Term
    n_measured: int = 0

    @property
    def log_sd(self) -> float:
        """Standard deviation of the logarithm of the total."""
        return float(np.log(self.total.high / self.total.low) / (2 * Z90)) if self.total.low > 0 else 0.0


class Calibration:
    """Scales of the terms of a sum, learned from measured totals.

    log y = log sum_j exp(theta_0 + theta_j) t_j + error, theta_j normal about 0 with the term's own spread, theta_0
    with that of the
    whole: the most probable scales by damped Gauss-Newton, their covariance from the curvature there.

    Args:
        spreads: Standard deviation of the logarithm of each term.
        scale_sd: The same for all of them together.
        noise_sd: The same for one measurement.
    """

    def __init__(self, spreads: Sequence[float], scale_sd: float, noise_sd: float) -> None:
        self.prior_sd = np.array([scale_sd, *spreads])
        self.noise_sd, self.n_measured, self.widening = noise_sd, 0, 1.0
        self.theta = np.zeros(len(self.prior_sd))
        self.covariance = np.diag(self.prior_sd**2)

    def fit(self, terms: Floats, measured: Floats) -> Calibration:
        """Learns from totals that were measured.

        Args:
            terms: The formulas' terms, one row a measurement.
            measured: The totals.
        """
        self.theta, self.covariance = self._solve(terms, np.log(measured))
        self.n_measured = len(measured)
        if len(measured) > 2:
            self.widening = self._widening(terms, np.log(measured))
        return self

    def forgetting(self, spreads: Mapping[int, float]) -> Calibration:
        """The same, but for terms that something else will make: whatever was learned of the whole, they are as the formula says.

        Args:
            spreads: Standard deviation of the logarithm of such a term, by its place.
        """
        found = copy.copy(self)
        found.theta, found.covariance = self.theta.copy(), self.covariance.copy()
        for place, sd in spreads.items():
            own = place + 1
            # theta_0 + theta_own is to have mean 0 and this deviation, and to hang together with nothing.
            found.theta[own] = -found.theta[0]
            found.covariance[own, :] = found.covariance[:, own] = -found.covariance[0, :]
            # That trials fell closer than expected says nothing of it.
            found.covariance[own, own] = found.covariance[0, 0] + (sd / found.widening) ** 2
        return found

    def predict(self, terms: Floats) -> tuple[Floats, Floats]:
        """Logarithms of the totals of rows of terms: mean and standard deviation of a measurement."""
        return self._predict(terms, self.theta, self.covariance, self.widening)

    def forecast(self, name: str, names: Sequence[str], terms: Floats) -> Forecast:
        """One row of terms as a forecast with 90 % intervals.

        Args:
            name: What the total is.
            names: Names of the terms.
            terms: Their values.
        """
        mean, sd = self.predict(terms[None, :])
        factors, spread = np.exp(self.theta[0] + self.theta[1:]), Z90 * np.sqrt(np.diag(self.covariance)[1:])
        parts = [
            Term(name=key, value=float(v * f), low=float(v * f * np.exp(-s)), high=float(v * f * np.exp(s)))
            for key, v, f, s in zip(names, terms, factors, spread, strict=True)
        ]
        low, value, high = (float(np.exp(mean[0] + sign * Z90 * sd[0])) for sign in (-1, 0, 1))
        return Forecast(terms=parts, total=Term(name=name, value=value, low=low, high=high), n_measured=self.n_measured)

    def _predict(self, terms: Floats, theta: Floats, covariance: Floats, widening: float) -> tuple[Floats, Floats]:
        total, slopes = self._total(terms, theta)
        variance = np.einsum("ij,jk,ik->i", slopes, covariance, slopes)
        sd = np.asarray(widening * np.sqrt(variance + self.noise_sd**2), dtype=float)
        return np.asarray(np.log(total), dtype=float), sd

    def _total(self, terms: Floats, theta: Floats) -> tuple[Floats, Floats]:
        scaled = np.asarray(terms, dtype=float) * np.exp(theta[0] + theta[1:])
        total = np.maximum(scaled.sum(axis=1), 1e-30)
        return total, np.column_stack([np.ones(len(total)), scaled / total[:, None]])

    def _solve(
        self, terms: Floats, y: Floats, start: Floats | None = None, iterations: int = ITERATIONS
    ) -> tuple[Floats, Floats]:
        theta, prior = (
            np.zeros(len(self.prior_sd)) if start is None else start,
            np.diag(1.0 / np.maximum(self.prior_sd, 1e-6) ** 2),
        )
        weight = np.full(len(y), 1.0 / self.noise_sd**2)
        for _ in range(iterations):
            total, slopes = self._total(terms, theta)
            residual = y - np.log(total)
            # One measurement that something else spoiled must not bend all scales: Huber's weights, beyond three
            # deviations.
            weight = np.minimum(1.0, 3.0 * self.noise_sd / np.maximum(np.abs(residual), 1e-12)) / self.noise_sd**2
            curvature = slopes.T @ (weight[:, None] * slopes) + prior
            step = np.linalg.solve(curvature, slopes.T @ (weight * residual) - prior @ theta)
            theta = theta + np.clip(step, -1.0, 1.0)
        _, slopes = self._total(terms, theta)
        return theta, np.asarray(np.linalg.inv(slopes.T @ (weight[:, None] * slopes) + prior), dtype=float)

    def _widening(self, terms: Floats, y: Floats) -> float:
        """How much wider (or narrower) than stated the errors are on measurements that were left out."""
        errors = []
        for left in np.unique(np.linspace(0, len(y) - 1, MOST_LEFT_OUT).astype(int)):
            rows = np.arange(len(y)) != left
            theta, covariance = self._solve(terms[rows], y[rows], self.theta, iterations=3)
            mean, sd = self._predict(terms[left][None, :], theta, covariance, 1.0)
            errors.append(abs(float(y[left] - mean[0])) / float(sd[0]))
        found = float(np.quantile(errors, 0.9)) / Z90
        n = len(y)
        return float(np.clip((found * n + PRIOR_ERRORS) / (n + PRIOR_ERRORS), 1.0 / WIDEST, WIDEST))


class Predictor:
    """Peak memory and step time of candidates, corrected by what was measured.

    Args:
        profile: The workload.
        machine: What it runs on.
        base: Settings by dotted path that hold where a candidate says nothing; see `settings_of`.
    """

    def __init__(self, profile: Profile, machine: Machine, base: Mapping[str, Any] | None = None) -> None:
        self.profile, self.machine, self.base = profile, machine, dict(base or {})
        self._measured: dict[tuple[Candidate, Machine], tuple[float | None, float | None]] = {}
        self._fitted: tuple[Calibration, Calibration] | None = None
        # The terms of what was measured, which many fits ask for; by column of `_measured`.
        self._rows: tuple[dict[tuple[Candidate, Machine], Floats], ...] = ({}, {})

    def learn(
        self,
        candidate: Candidate,
        *,
        peak_memory_bytes: float | None,
        step_time_s: float | None,
        machine: Machine | None = None,
    ) -> None:
        """Takes what a trial measured; the latest counts where a candidate was measured twice.

        Args:
            candidate: The configuration.
            peak_memory_bytes: Its peak.
            step_time_s: Its step time.
            machine: What it ran on, where that was not the predictor's machine (another number of ranks).
        """
        self._measured[candidate, machine or self.machine] = (peak_memory_bytes, step_time_s)
        self._fitted = None

    def on(self, machine: Machine, link_sd: Mapping[str, float] | None = None) -> Predictor:
        """The same workload on another machine, with what was learned here.

        Args:
            machine: Where to.
            link_sd: Standard deviations of the logarithms of `communication` and `messages`, where the links are
                others, so that what was learned of these says nothing of those; None if they are the same.
        """
        found = Predictor(self.profile, machine, self.base)
        sizes, times = self._calibrations()
        places = {list(step_time_module.SPREADS).index(name): sd for name, sd in (link_sd or {}).items()}
        found._fitted = sizes, times.forgetting(places)
        return found

    def memory(self, candidate: Candidate) -> Forecast:
        """Peak bytes of a rank."""
        return self._calibrations()[0].forecast(
            "peak memory", list(memory_formulas.SPREADS), self.memory_terms([candidate])[0]
        )

    def step_time(self, candidate: Candidate) -> Forecast:
        """Seconds of an optimizer step."""
        return self._calibrations()[1].forecast(
            "step time", list(step_time_module.SPREADS), self.time_terms([candidate])[0]
        )

    def memory_terms(self, candidates: Sequence[Candidate]) -> Floats:
        """The terms of the formula for memory, one row a candidate."""
        return self._terms(memory_formulas.memory_terms, memory_formulas.SPREADS, candidates, self.machine)

    def time_terms(self, candidates: Sequence[Candidate]) -> Floats:
        """The terms of the formula for step time, one row a candidate."""
        return self._terms(step_time_terms, step_time_module.SPREADS, candidates, self.machine)

    def log_memory(self, candidates: Sequence[Candidate]) -> tuple[Floats, Floats]:
        """Logarithm of the peak of many candidates: mean and standard deviation."""
        return self._calibrations()[0].predict(self.memory_terms(candidates))

    def _terms(
        self, formula: Formula, names: Iterable[str], candidates: Sequence[Candidate], machine: Machine
    ) -> Floats:
        table = formula(Knobs.of(candidates, self.base), self.profile, machine)
        return np.column_stack([table[name] for name in names])

    def _calibrations(self) -> tuple[Calibration, Calibration]:
        if self._fitted is None:
            guessed, probed = self.profile.guessed, self.machine.measured
            sizes = Calibration(
                list(memory_formulas.spreads(self.profile).values()),
                GUESSED_MEMORY_SCALE if guessed else MEMORY_SCALE,
                MEMORY_NOISE,
            )
            times = Calibration(
                list(step_time_module.SPREADS.values()),
                TIME_SCALE if probed and not guessed else GUESSED_TIME_SCALE,
                TIME_NOISE,
            )
            for column, calibration, formula, names in (
                (0, sizes, memory_formulas.memory_terms, memory_formulas.SPREADS),
                (1, times, step_time_terms, step_time_module.SPREADS),
            ):
                rows = {key: found[column] for key, found in self._measured.items() if found[column]}
                if rows:
                    known = self._rows[column]
                    for machine in dict.fromkeys(m for _, m in rows):
                        new = [c for c, m in rows if m == machine and (c, m) not in known]
                        if new:
                            terms = self._terms(formula, names, new, machine)
                            known |= {(c, machine): row for c, row in zip(new, terms, strict=True)}
                    calibration.fit(np.vstack([known[key] for key in rows]), np.array(list(rows.values()), dtype=float))
            self._fitted = sizes, times
        return self._fitted


def probability_below(forecast: Forecast, limit: float) -> float:
    """Probability that the total is below a limit."""
    from math import erf, log, sqrt

    sd = max(forecast.log_sd, 1e-6)
    return 0.5 * (1 + erf((log(limit) - log(max(forecast.total.value, 1e-30))) / (sd * sqrt(2))))


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """A DeepSpeed configuration as settings by dotted path."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{inner}": leaf for inner, leaf in settings_of(value).items()}
        elif value != "auto":
            found[key] = value
    return found


@dataclass(frozen=True, kw_only=True)
class ForecastInputs:
    """What forecasts for a target rest on.

    Attributes:
        profile: The workload.
        machine: What it runs on, with as many ranks as were asked for.
        world_size: Ranks.
        base_config: What candidates are laid over.
        baseline: The user's own configuration.
        setting: What legality depends on.
        share_bytes: Memory of a rank's device; on a CPU its share of the machine's.
        notes: What the user should know.
    """

    profile: Profile
    machine: Machine
    world_size: int
    base_config: DsConfig
    baseline: Candidate
    setting: Setting
    share_bytes: float
    notes: list[str]
