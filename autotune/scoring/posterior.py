"""The joint posterior of the trials' log step times, from every measurement of a study: a linear mixed model."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autotune.scoring.shared_cores import SLOPE, SLOPE_SD
from autotune.trial.profile import Floats

# What the marginal likelihood weighs, as standard deviations of the logarithm: noise of one measurement, drift of the
# machine from one trial to the next, the factor on what is stated of the trials' effects, and what no forecast knows of a
# trial, which readings of one trial that agree tell from noise. Each prior is log-normal, given as median and standard
# deviation of the logarithm.
NOISE, NOISE_PRIOR = (0.003, 0.006, 0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8), (0.03, 0.7)
DRIFT, DRIFT_PRIOR = (0.001, 0.005, 0.02, 0.08), (0.003, 1.5)
EFFECT_SCALE, SCALE_PRIOR = (0.3, 1.0, 3.0), (1.0, 1.0)
OWN, OWN_PRIOR = (0.003, 0.01, 0.03, 0.1), (0.01, 0.7)
# Of the trials without a forecast: how much their logarithms differ among each other.
POPULATION_SD = 0.3
# The level of a whole study and that of a round of re-measurements, which later trials do not foretell.
LEVEL_SD, ROUND_SD = 3.0, 0.5
# How much the machine may have changed over a pause between two first measurements: another's load has come or gone.
PAUSE_SD = 0.3
# What lies further than this many standard deviations from what the others foretell is an outlier. The worst are taken
# out first, since they hide others: each time one, or this share of the readings.
OUTLYING, AT_ONCE, MOST_TIMES = 3.0, 0.04, 4
# A forecast may be far off where few trials have corrected it: only beyond this number of standard deviations is a reading doubted.
SURPRISING = 1.5
# An outlier may hide itself, since noise that is as large explains it: one that makes all readings this much likelier where it is
# taken out is one (a logarithm: 150 times).
HIDDEN = 5.0
# The grid is weighed on this many readings; cost is cubic.
MOST_FOR_GRID = 64
# Points of the grid with less than this share of the weight are left out.
LEAST_WEIGHT = 0.02


@dataclass(frozen=True, kw_only=True)
class Readings:
    """All measurements of a study.

    Attributes:
        own_sd: Its standard deviation as far as its own run tells.
        trial: The trial that it measures, as a row of `forecast`.
        round: The re-measurement round that it belongs to; 0 for the trials' first measurements.
        sitting: Which of the study's sittings, between pauses, a first measurement belongs to; 0 for the first.
        slowed: What other processes did to it, as a logarithm, less what they usually did (see `shared_cores`).
        forecast: What is foretold of each trial's logarithm but for what was read of it; NaN where nothing is.
        forecast_cov: Covariance of what is foretold; 0 where nothing is.
    """

    log_value: Floats
    own_sd: Floats
    trial: NDArray[np.intp]
    round: NDArray[np.intp]
    sitting: NDArray[np.intp]
    slowed: Floats
    forecast: Floats
    forecast_cov: Floats

    def take(self, rows: NDArray[np.intp]) -> "Readings":
        """Some of the readings."""
        each = ("log_value", "own_sd", "trial", "round", "sitting", "slowed")
        return replace(self, **{name: getattr(self, name)[rows] for name in each})


@dataclass(frozen=True)
class Posterior:
    """Means and covariances of the trials' logarithms, all on the machine as it was on average.

    Attributes:
        mean: Mean of each trial's logarithm.
        cov: Covariance of each two trials' logarithms.
        noise_sd: Standard deviation of the logarithm of one measurement.
        least, most: How far the lowest reading of each trial lies below (a negative number) and the highest above what all
            other readings foretell, where that is surprising; else 0, as without a forecast.
    """

    mean: Floats
    cov: Floats
    noise_sd: float
    least: Floats
    most: Floats

    def sd_of_difference(self, one: int, other: int) -> float:
        """Standard deviation of the difference of two trials' logarithms."""
        variance = self.cov[one, one] + self.cov[other, other] - 2 * self.cov[one, other]
        return float(np.sqrt(max(variance, 0.0)))


@dataclass(frozen=True)
class _Scales:
    """One point of the grid.

    Attributes:
        weight: Logarithm of its prior, or of its share.
        likely: Logarithm of prior times likelihood, up to a constant.
    """

    noise: float
    drift: float
    effect: float
    own: float
    weight: float
    likely: float = 0.0


class _Model:
    """The covariances of some readings, by the parts that the grid scales.

    log reading = level + forecast + effect of the trial + load by others + state of the machine + noise. The state is a
    random walk over the first measurements, in order, with another level after each pause, and a separate one for each
    round of re-measurements.
    """

    def __init__(self, readings: Readings, positions: Floats, own_sd: Floats, extra_var: Floats) -> None:
        self.readings = readings
        known = np.isfinite(readings.forecast)
        self.prior_mean = np.where(known, readings.forecast, 0.0)
        self.group = known.astype(int)
        self.effects_cov = readings.forecast_cov + np.diag(own_sd**2)
        self.own_cov = np.diag(known.astype(float))
        self.y = readings.log_value - self.prior_mean[readings.trial] - SLOPE * readings.slowed
        shared = SLOPE_SD**2 * np.outer(readings.slowed, readings.slowed)
        first = readings.round == 0
        at = np.where(first, positions, 0.0)
        self.walk = np.minimum(at[:, None], at[None, :])
        same_round = (readings.round[:, None] == readings.round[None, :]) & ~first[:, None]
        later = np.where(first, readings.sitting, 0)
        same_sitting = (later[:, None] == later[None, :]) & (later[:, None] > 0)
        self.state = ROUND_SD**2 * same_round + PAUSE_SD**2 * same_sitting
        same_group = self.group[readings.trial][:, None] == self.group[readings.trial][None, :]
        self.level = LEVEL_SD**2 * same_group
        pairs = np.ix_(readings.trial, readings.trial)
        self.fixed = self.level + self.state + shared + np.diag(readings.own_sd**2 + extra_var)
        self.parts = np.array([np.eye(len(self.y)), self.walk, self.effects_cov[pairs], self.own_cov[pairs]])

    def covariances(self, points: Sequence[_Scales]) -> Floats:
        """Covariance of the readings at each point."""
        scales = np.array([[each.noise, each.drift, each.effect, each.own] for each in points])
        return np.asarray(self.fixed + np.tensordot(scales**2, self.parts, axes=1), dtype=float)

    def log_likelihoods(self, points: Sequence[_Scales]) -> Floats:
        """Logarithms of the marginal likelihood, up to a constant."""
        return log_likelihoods(self.y, self.covariances(points))

    def surprise(self, scales: _Scales) -> tuple[Floats, Floats]:
        """Each reading less what all others foretell, in standard deviations and as it is."""
        inverse = np.linalg.inv(self.covariances([scales])[0])
        apart, precision = inverse @ self.y, np.diag(inverse)
        return apart / np.sqrt(precision), apart / precision

    def effects(self, scales: _Scales) -> tuple[Floats, Floats]:
        """Mean and covariance of all trials' logarithms in the machine's average state."""
        own = self.readings.trial
        state = self.state + scales.drift**2 * self.walk
        prior = scales.effect**2 * self.effects_cov + scales.own**2 * self.own_cov
        level = LEVEL_SD**2 * (self.group[:, None] == self.group[None, :])
        mean_state, mean_state_var = state.mean(axis=0), state.mean()
        across = level[:, own] + prior[:, own] + mean_state
        solved = np.linalg.solve(self.covariances([scales])[0], np.column_stack([self.y, across.T]))
        mean = self.prior_mean + across @ solved[:, 0]
        cov = level + prior + mean_state_var - across @ solved[:, 1:]
        return mean, cov


def log_likelihoods(y: Floats, covariances: Floats) -> Floats:
    """Logarithms of the likelihood of some values under a normal of each covariance, up to a constant."""
    lower = np.linalg.cholesky(covariances)
    white = np.linalg.solve(lower, np.broadcast_to(y[:, None], (len(lower), len(y), 1)))[:, :, 0]
    determinants = np.log(np.diagonal(lower, axis1=1, axis2=2)).sum(axis=1)
    return np.asarray(-0.5 * (white**2).sum(axis=1) - determinants, dtype=float)


def root(covariance: Floats) -> Floats:
    """A factor of a covariance, which is that times its own transpose."""
    values, vectors = np.linalg.eigh(covariance)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0)), dtype=float)


def fit(readings: Readings) -> Posterior:
    """The posterior, averaged over noise, drift and scale of the effects by their marginal likelihood.

    A reading that all others contradict counts as more noisy. Where the trial has hardly another one, its forecast is
    taken to be wrong instead.

    Args:
        readings: The readings; there must be at least one.
    """
    known = np.isfinite(readings.forecast)
    own_sd = np.where(known, 0.0, POPULATION_SD)
    positions = np.cumsum(readings.round == 0) - 1.0  # a re-measurement is no step of the walk
    n_of = np.bincount(readings.trial, minlength=len(known))
    extra_var = np.zeros(len(positions))
    for n in range(MOST_TIMES + 1):
        points = _weighed(readings, positions, own_sd, extra_var)
        model = _Model(readings, positions, own_sd, extra_var)
        z, beyond = model.surprise(points[0])
        if n == 0:
            least, most = np.zeros(len(known)), np.zeros(len(known))
            surprising = np.where(known[readings.trial] & (np.abs(z) > SURPRISING), beyond, 0.0)
            np.minimum.at(least, readings.trial, surprising)
            np.maximum.at(most, readings.trial, surprising)
        z, apart = np.abs(z), np.abs(beyond)
        worst = np.argsort(-z)[: max(1, int(AT_ONCE * len(z)))]
        outlying = worst[z[worst] > OUTLYING]
        if not len(outlying) and n_of[readings.trial[worst[0]]] > 2:
            without = extra_var.copy()
            without[worst[0]] += apart[worst[0]] ** 2
            if _weighed(readings, positions, own_sd, without)[0].likely > points[0].likely + HIDDEN:
                outlying = worst[:1]
        if n == MOST_TIMES or not len(outlying):
            break
        for row in outlying:
            trial = readings.trial[row]
            if n_of[trial] > 2:
                extra_var[row] += apart[row] ** 2
            else:
                own_sd[trial] = np.hypot(own_sd[trial], apart[row] / points[0].effect)
    weights = np.exp([point.weight for point in points])
    found = [model.effects(point) for point in points]
    mean = sum(w * m for w, (m, _) in zip(weights, found, strict=True))
    cov = sum(w * (c + np.outer(m - mean, m - mean)) for w, (m, c) in zip(weights, found, strict=True))
    noise = float(weights @ [point.noise for point in points])
    return Posterior(np.asarray(mean), np.asarray(cov), noise, least, most)


def _weighed(readings: Readings, positions: Floats, own_sd: Floats, extra_var: Floats) -> list[_Scales]:
    """The points of the grid that matter, the likeliest first, with the logarithms of their shares of the weight."""
    rows = _telling(readings)
    model = _Model(readings.take(rows), positions[rows], own_sd, extra_var[rows])
    points = _grid(known=bool(model.group.any()))
    logs = np.array([point.weight for point in points]) + model.log_likelihoods(points)
    shares = np.exp(logs - logs.max())
    shares /= shares.sum()
    kept = [i for i in np.argsort(-shares) if shares[i] >= min(LEAST_WEIGHT, shares.max())]
    total = shares[kept].sum()
    return [replace(points[i], weight=float(np.log(shares[i] / total)), likely=float(logs[i])) for i in kept]


@functools.cache
def _grid(*, known: bool) -> list[_Scales]:
    """All points, with the logarithms of their priors; without a forecast what it does not know is nothing to weigh."""
    each = itertools.product(NOISE, DRIFT, EFFECT_SCALE, OWN if known else OWN[:1])
    priors = NOISE_PRIOR, DRIFT_PRIOR, SCALE_PRIOR, OWN_PRIOR
    return [_Scales(*point, weight=sum(map(_log_normal, point, priors))) for point in each]


def _log_normal(value: float, prior: tuple[float, float]) -> float:
    return -0.5 * float(np.log(value / prior[0]) / prior[1]) ** 2


def _telling(readings: Readings) -> NDArray[np.intp]:
    """The readings that the grid is weighed on: those of trials measured again, and others at equal distances."""
    n = len(readings.trial)
    if n <= MOST_FOR_GRID:
        return np.arange(n)
    n_of = np.bincount(readings.trial)
    again = np.flatnonzero(n_of[readings.trial] > 1)[-MOST_FOR_GRID:]
    spread = np.linspace(0, n - 1, MOST_FOR_GRID - len(again)).astype(int) if len(again) < MOST_FOR_GRID else again[:0]
    return np.unique(np.concatenate([again, spread]))


def shrunk(values: Floats, variances: Floats) -> tuple[Floats, Floats]:
    """Returns the values of several trials, each drawn towards their mean, and the variances of the drawn values.

    A value is drawn as far as its own error explains its distance from the mean.

    A random-effects model, its variance between trials by moments (DerSimonian and Laird 1986).

    Args:
        values: One value for each trial.
        variances: Variances of the values' errors.
    """
    weights = 1 / variances
    mean = float(weights @ values / weights.sum())
    degrees = len(values) - 1
    excess = float(weights @ (values - mean) ** 2) - degrees
    between = max(0.0, excess / float(weights.sum() - (weights @ weights) / weights.sum())) if degrees else 0.0
    weights = 1 / (variances + between)
    mean = float(weights @ values / weights.sum())
    share = between * weights
    return mean + share * (values - mean), share * variances
