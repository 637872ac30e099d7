"""The calibrated model: a Gaussian process on log(measured / predicted), with linear features and noise learned from the trials."""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from autotune.scoring import posterior
from autotune.scoring.quantiles import Z90, Z95
from autotune.trial.profile import Floats

# The four scales of the model, with the values that their marginal likelihood weighs: a factor on the stated standard deviations of the
# linear coefficients; and standard deviations of the logarithm, of the smooth remainder, of a trial's noise, and of what two levels of
# different knobs do together, which nothing else in the model tells from noise.
WIDTH = (0.06, 0.2, 0.6, 2.0)
SMOOTH_SD = (0.02, 0.06, 0.15, 0.3)
NOISE_SD = (0.012, 0.03, 0.06, 0.1, 0.15, 0.2)
PAIR_SD = (0.003, 0.03, 0.12)
# The prior of each scale before anything was measured: its median; the standard deviation of its logarithm is 1.
# The formulas leave less of the memory unexplained than of the time.
TYPICAL_WIDTH, TYPICAL_SMOOTH, TYPICAL_NOISE, TYPICAL_PAIR = 0.2, 0.1, 0.1, 0.005
MEMORY_SMOOTH = 0.03
# Every combination of the four, one row each.
GRID = np.array(list(itertools.product(WIDTH, SMOOTH_SD, NOISE_SD, PAIR_SD)))
GRID_VARIANCES, GRID_LOGS = GRID**2, np.log(GRID)
MOST_FOR_CHOICE = 60
# Rows that are worked out at once: with the observations beside them very many take gigabytes.
AT_ONCE = 4000
ROUNDS, STEPS, IMPUTATIONS = 2, 8, 4
LARGEST_CORRECTION = 4.0
JITTER = 1e-9
# What no feature explains of a candidate, beside a trial's noise, and above which similarity two rows are one candidate.
OWN_SD, SAME = 0.01, 1.0 - 1e-9
# A trial that lies further than this many standard deviations from what the others foretell counts as more noisy, while
# such trials are few.
OUTLYING, MOST_OUTLYING = 2.5, 0.2
# Leave-one-out errors weigh against this many that agree with the stated deviations; beyond `FAR` they count as `FAR`.
PRIOR_ERRORS, FAR, NARROWEST, WIDEST = 8.0, 4.0, 1.15, 2.0
# What a trial's own interval can say of its noise at most, and what a trial that was stopped has besides (standard
# deviations of the logarithm).
WIDEST_OWN, STOPPED_SD = 0.2, 0.1
# Noise of a trial's peak memory, and of its step time where no interval is known, as standard deviations of the
# logarithm. Between trials times scatter more than the steps within one say: on the truth tables four times as much.
MEMORY_NOISE, TIME_NOISE, BETWEEN_TRIALS, LARGEST_NOISE = 0.02, 0.03, 4.0, 0.15
# A trial that ran out of memory needed at least this multiple of the limit.
OVER_LIMIT = 1.02


@dataclass(frozen=True, kw_only=True)
class Design:
    """Rows that a model can be asked about.

    Attributes:
        terms: What the prior adds up, one column a term; every row has a positive sum.
        linear: Features with a coefficient each; the first is the constant.
        smooth: Coordinates in which the remainder is smooth, at a length scale of 1.
        levels: A column for each level of a knob, 1 where a row has it: each two levels have an offset together.
    """

    terms: Floats
    linear: Floats
    smooth: Floats
    levels: Floats

    def take(self, rows: NDArray[np.intp] | slice) -> "Design":
        """Some of the rows."""
        return Design(
            terms=self.terms[rows], linear=self.linear[rows], smooth=self.smooth[rows], levels=self.levels[rows]
        )


def joined(designs: Sequence[Design]) -> Design:
    """The rows of several designs, in order."""
    return Design(
        terms=np.vstack([d.terms for d in designs]),
        linear=np.vstack([d.linear for d in designs]),
        smooth=np.vstack([d.smooth for d in designs]),
        levels=np.vstack([d.levels for d in designs]),
    )


@dataclass(frozen=True, kw_only=True)
class Data:
    """Observations, one row each.

    Attributes:
        y: Logarithms of the values; for a censored row its lower bound.
        group: Rows of one group come from one trial and share its noise.
        extra_sd: Noise that a row has besides its trial's.
        censored: The value is at least this.
    """

    design: Design
    y: Floats
    group: NDArray[np.intp]
    extra_sd: Floats
    censored: NDArray[np.bool_]

    @classmethod
    def of(
        cls, design: Design, y: Sequence[float] | Floats, extra_sd: Sequence[float] | None = None, n_censored: int = 0
    ) -> "Data":
        """Rows of one trial each, of which the last `n_censored` are censored."""
        n = len(y)
        return cls(
            design=design, y=np.array(y, dtype=float), group=np.arange(n), censored=np.arange(n) >= n - n_censored,
            extra_sd=np.zeros(n) if extra_sd is None else np.array(extra_sd, dtype=float),
        )  # fmt: skip

    def take(self, rows: NDArray[np.intp]) -> "Data":
        """Some of the rows."""
        return Data(
            design=self.design.take(rows), y=self.y[rows], group=self.group[rows], extra_sd=self.extra_sd[rows],
            censored=self.censored[rows],
        )  # fmt: skip


class CalibratedGP:
    """The posterior after the observations; made by `fit`.

    The model is y = log(sum of terms x exp(correction of the term)) + linear features x coefficients + a smooth
    remainder (squared-exponential kernel) + an offset for each two levels + noise. The corrections enter linearised at their best estimate
    (Gauss-Newton), so a wrong bandwidth in the prior is corrected where it matters and not everywhere.

    Args:
        linear_sd: Prior standard deviation of each linear coefficient.
        term_sd: Prior standard deviation of the correction of each term (of its logarithm).
        noise: Where the noise of a trial is expected, as a standard deviation.
        smooth: The same for the remainder.

    Attributes:
        smooth_sd: Standard deviation of the remainder.
        pair_sd: The same for the offset of two levels.
        noise_sd: Noise of a trial.
        n_observed: Trials that were observed, but for the censored ones.
        covered: Share of the observations in their 90 % interval, each foretold from the others; 0 before there are any.
    """

    def __init__(self, linear_sd: Floats, term_sd: Floats, noise: float, smooth: float) -> None:
        self.stated_sd, self.linear_sd, self.term_sd = linear_sd, linear_sd, term_sd
        self.correction, self.own_sd = np.zeros(len(term_sd)), 0.0
        self.covered, self.n_observed = 0.0, 0
        self._data: Data | None = None
        self._inflation: dict[int, float] = {}
        self._wider, self._loo_error = NARROWEST, 1.0
        typical = np.log([TYPICAL_WIDTH, smooth, noise, TYPICAL_PAIR])
        self._expected = -0.5 * ((GRID_LOGS - typical) ** 2).sum(axis=1)
        self._choose(self._expected)

    def learn(self, data: Data) -> None:
        """Chooses scales, corrections and the weights of outlying trials by uncensored rows, one for each trial."""
        for number in range(ROUNDS):
            self._correct(data.y, data)
            self._choose(self._expected + self._likelihoods(data))
            self.observe(data)
            inverse = scipy.linalg.cho_solve(self._factor, np.eye(len(data.y)))
            # Leave-one-out errors in units of their own deviations (Rasmussen and Williams, 5.4.2).
            errors = np.abs(self._alpha) / np.sqrt(np.diag(inverse))
            if not number:  # an outlying trial counts against the model
                self.covered = float((errors <= Z90).mean())
            outlying = errors > OUTLYING
            if outlying.mean() <= MOST_OUTLYING:
                self._inflation = dict(zip(data.group[outlying], errors[outlying] / OUTLYING, strict=True))
        n, squares = len(errors), (np.minimum(errors, FAR) ** 2).sum()
        self._loo_error = min(WIDEST, float(np.sqrt((squares + PRIOR_ERRORS) / (n + PRIOR_ERRORS))))
        self._wider = max(NARROWEST, self._loo_error)

    def _choose(self, log_weights: Floats) -> None:
        """Takes means over the grid, of variances and of the noise's logarithm: few trials single out no point of it."""
        weights = np.exp(log_weights - log_weights.max())
        weights = weights / weights.sum()
        width, self.smooth_sd, _, self.pair_sd = (float(v) for v in np.sqrt(weights @ GRID_VARIANCES))
        self._typical_scales = np.exp(weights @ GRID_LOGS)
        self.noise_sd = float(self._typical_scales[2])
        self.linear_sd = self._scaled(width)

    def _scaled(self, width: float) -> Floats:
        return np.concatenate([self.stated_sd[:1], self.stated_sd[1:] * width])

    def typical(self) -> "CalibratedGP":
        """The same observations under the typical scales.

        An interval has to hold whatever the scales are, so it rests on their mean variances, which the largest dominate.
        The best of many candidates is overrated by that: its draws rest on the geometric means, and on what each
        candidate has besides.
        """
        if self._data is None:
            return self
        found = copy.copy(self)
        width, found.smooth_sd, _, found.pair_sd = (float(v) for v in self._typical_scales)
        found.linear_sd, found.own_sd, found._wider = self._scaled(width), OWN_SD, max(1.0, self._loo_error)
        found.observe(self._data, self._y)
        return found

    def _likelihoods(self, data: Data) -> Floats:
        """Log marginal likelihood of each point of the grid, at the corrections as they stand."""
        base, shares = self._prior(data.design)
        target = data.y - base + shares @ self.correction
        features = data.design.linear * self.stated_sd
        fixed = np.hstack([features[:, :1], shares * self.term_sd])
        smooth, levels = data.design.smooth, data.design.levels
        parts = np.array(
            [
                features[:, 1:] @ features[:, 1:].T,
                _kernel(smooth, smooth),
                self._shared(data),
                _pairs(levels @ levels.T),
            ]
        )
        covariance = fixed @ fixed.T + np.diag(data.extra_sd**2 + JITTER) + np.tensordot(GRID_VARIANCES, parts, axes=1)
        return posterior.log_likelihoods(target, covariance)

    def _shared(self, data: Data) -> Floats:
        """Which rows share the noise of a trial, and how much more of it than others an outlying trial has."""
        factor = np.array([self._inflation.get(int(group), 1.0) for group in data.group])
        same = data.group[:, None] == data.group[None, :]
        return np.asarray(same * np.outer(factor, factor), dtype=float)

    def _remainder(self, data: Data) -> Floats:
        return (
            self._unexplained(data.design, data.design)
            + self.noise_sd**2 * self._shared(data)
            + np.diag(data.extra_sd**2 + JITTER)
        )

    def _unexplained(self, a: Design, b: Design) -> Floats:
        """Covariance of what the terms and the linear features leave, noise aside."""
        alike = _kernel(a.smooth, b.smooth)
        together = self.pair_sd**2 * _pairs(a.levels @ b.levels.T)
        return np.asarray(self.smooth_sd**2 * alike + self.own_sd**2 * (alike > SAME) + together, dtype=float)

    def observe(self, data: Data, y: Floats | None = None) -> None:
        """Conditions on observations; the scales stay.

        Args:
            y: Values in place of `data.y`, where censored ones were filled in.
        """
        y = data.y if y is None else y
        self._data, self._y = data, y
        self._correct(y, data)
        base, shares = self._prior(data.design)
        self._features = np.hstack([data.design.linear * self.linear_sd, shares * self.term_sd])
        target = y - base + shares @ self.correction
        self._factor = scipy.linalg.cho_factor(self._features @ self._features.T + self._remainder(data), lower=True)
        self._alpha = scipy.linalg.cho_solve(self._factor, target)
        self._weights = self._features.T @ self._alpha

    def _correct(self, y: Floats, data: Data) -> None:
        """The most likely corrections of the terms, everything else integrated out: Gauss-Newton from where they stand."""
        if not self.term_sd.any():
            return
        linear = data.design.linear * self.linear_sd
        lower = scipy.linalg.cholesky(linear @ linear.T + self._remainder(data), lower=True)
        whitened = scipy.linalg.solve_triangular(lower, np.eye(len(lower)), lower=True)  # used in every step
        for _ in range(STEPS):
            base, shares = self._prior(data.design)
            slopes, sd = whitened @ (shares * self.term_sd), np.maximum(self.term_sd, 1e-6)
            gradient = slopes.T @ (whitened @ (y - base)) - self.correction / sd
            move = self.term_sd * np.linalg.solve(slopes.T @ slopes + np.eye(len(sd)), gradient)
            self.correction = np.clip(
                self.correction + np.clip(move, -1.0, 1.0), -LARGEST_CORRECTION, LARGEST_CORRECTION
            )
            if np.abs(move).max() < 0.01:
                return

    def mean(self, design: Design, *, smooth: bool = False) -> Floats:
        """The expected logarithm in each row, without the smooth remainder unless asked for: cheap for very many rows."""
        base = np.log(design.terms @ np.exp(self.correction))
        if self._data is None:
            return np.asarray(base, dtype=float)
        found = base + design.linear @ (self.linear_sd * self._weights[: len(self.linear_sd)])
        if smooth:
            found = found + self._unexplained(design, self._data.design) @ self._alpha
        return np.asarray(found, dtype=float)

    def remainder(self, design: Design) -> Floats:
        """Expected logarithm of what knobs and machine add to the corrected terms in each row."""
        base, _ = self._prior(design)
        return np.asarray(self.predict(design)[0] - base, dtype=float)

    def predict(self, design: Design, *, noise: bool = False) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the logarithm in each row; with `noise` of what a trial would measure."""
        found = []
        for start in range(0, max(1, len(design.terms)), AT_ONCE):
            part = design.take(slice(start, start + AT_ONCE))
            centre, features, explained = self._conditioned(part)
            found.append((centre, np.maximum(self._variance(part, features, explained), 1e-8)))
        mean, variance = (np.concatenate(each) for each in zip(*found, strict=True))
        more = self.noise_sd if noise else 0.0
        return mean, np.asarray(np.hypot(self._wider * np.sqrt(variance), more), dtype=float)

    def sd_apart(self, design: Design, others: Design) -> Floats:
        """Standard deviation of the difference of each row from each of some others: what all have in common is no part of it.

        Returns:
            A row for each row of `design`, a column for each of `others`.
        """
        (_, a, seen_a), (_, b, seen_b) = self._conditioned(design), self._conditioned(others)
        shared = a @ b.T + self._unexplained(design, others) - seen_a.T @ seen_b
        variance = (
            self._variance(design, a, seen_a)[:, None] + self._variance(others, b, seen_b)[None, :] - 2.0 * shared
        )
        return np.asarray(self._wider * np.sqrt(np.maximum(variance, 1e-8)), dtype=float)

    def draw(self, design: Design, rng: np.random.Generator, n: int) -> Floats:
        """Joint draws of the logarithm in each row, without a trial's noise: `n` rows, a column for each row of the design."""
        centre, features, explained = self._conditioned(design)
        covariance = features @ features.T + self._unexplained(design, design) - explained.T @ explained
        scale = posterior.root(covariance)
        return np.asarray(centre + self._wider * rng.standard_normal((n, len(scale))) @ scale.T, dtype=float)

    def _conditioned(self, design: Design) -> tuple[Floats, Floats, Floats]:
        """Expected logarithm and features of each row, and the factor of what the observations explain, a column for each row."""
        base, shares = self._prior(design)
        features = np.hstack([design.linear * self.linear_sd, shares * self.term_sd])
        if self._data is None:
            return base, features, np.zeros((0, len(base)))
        cross = features @ self._features.T + self._unexplained(design, self._data.design)
        centre = base - shares @ self.correction + cross @ self._alpha
        return centre, features, scipy.linalg.solve_triangular(self._factor[0], cross.T, lower=True)

    def _variance(self, design: Design, features: Floats, explained: Floats) -> Floats:
        """Variance that the observations leave in each row."""
        prior = (features**2).sum(axis=1) + self.smooth_sd**2 + self.own_sd**2
        prior = prior + self.pair_sd**2 * _pairs(design.levels.sum(axis=1))
        return np.asarray(prior - (explained**2).sum(axis=0), dtype=float)

    def joint(self) -> tuple[NDArray[np.intp], Floats, Floats]:
        """Joint prediction of each group's first row from the differences within groups: groups, means and covariance.

        Features and scales are as the observations made them. Of the observations themselves only the differences within
        a group count, which are free of the noise that its rows share.
        """
        data = self._data
        if data is None:
            return np.zeros(0, dtype=np.intp), np.zeros(0), np.zeros((0, 0))
        base, shares = self._prior(data.design)
        mean = base - shares @ self.correction
        covariance = self._wider**2 * (self._features @ self._features.T + self._unexplained(data.design, data.design))
        groups, first, row_of = np.unique(data.group, return_index=True, return_inverse=True)
        others = np.setdiff1d(np.arange(len(mean)), first)
        if not len(others):
            return groups, mean, covariance
        own = first[row_of[others]]
        apart = covariance[others] - covariance[own]
        within = apart[:, others] - apart[:, own] + np.diag(data.extra_sd[others] ** 2 + JITTER)
        gain = np.linalg.solve(within, apart[:, first]).T
        seen = (self._y - mean)[others] - (self._y - mean)[own]
        return groups, mean[first] + gain @ seen, covariance[np.ix_(first, first)] - gain @ apart[:, first]

    def correction_sd(self) -> Floats:
        """Posterior standard deviation of the correction of each term."""
        if self._data is None:
            return self.term_sd
        cross = self._features[:, -len(self.term_sd) :] * self.term_sd
        explained = scipy.linalg.solve_triangular(self._factor[0], cross, lower=True)
        return np.asarray(np.sqrt(np.maximum(self.term_sd**2 - (explained**2).sum(axis=0), 0.0)), dtype=float)

    def _prior(self, design: Design) -> tuple[Floats, Floats]:
        """The corrected prior in each row, and the share of each term in it, which is the derivative by its correction."""
        scaled = design.terms * np.exp(self.correction)
        total = scaled.sum(axis=1)
        return np.log(total), scaled / total[:, None]


def fit(
    data: Data | None, linear_sd: Floats, term_sd: Floats, noise: float = TYPICAL_NOISE, smooth: float = TYPICAL_SMOOTH
) -> CalibratedGP:
    """The posterior, with scales weighed by how likely they make the observations.

    Censored observations are filled in by their expectation under the model, again and again (Buckley and James, 1979).
    """
    model = CalibratedGP(linear_sd, term_sd, noise, smooth)
    if data is None or not len(data.y):
        return model
    # A trial's own value; what was derived from it would be foretold too well. Bounds alone teach too little.
    first = np.unique(data.group, return_index=True)[1]
    own = np.sort(first[~data.censored[first]])[-MOST_FOR_CHOICE:]
    model.n_observed = int((~data.censored[first]).sum())
    if len(own):
        model.learn(data.take(own))
    hidden = data.censored
    if not hidden.all():
        model.observe(data.take(np.flatnonzero(~hidden)))
    if not hidden.any():
        return model
    y, rows = data.y.copy(), data.design.take(np.flatnonzero(hidden))
    for _ in range(IMPUTATIONS):
        mean, sd = model.predict(rows)
        z = (data.y[hidden] - mean) / sd
        # E[m | m > c] = mean + sd phi(z) / (1 - Phi(z)), in logarithms so that a far tail stays finite.
        y[hidden] = np.maximum(
            data.y[hidden], mean + sd * np.exp(-0.5 * z**2 - 0.9189385332046727 - scipy.special.log_ndtr(-z))
        )
        model.observe(data, y)
    return model


def interval_sd(low: float, high: float) -> float:
    """Standard deviation of a logarithm from the 95 % interval of its value; the largest where that says nothing."""
    return min(WIDEST_OWN, float(np.log(high / low)) / (2 * Z95)) if 0 < low <= high < np.inf else WIDEST_OWN


def expected_noise(within: Sequence[float]) -> float:
    """Returns how far the step times of two trials of one configuration are expected to differ.

    Args:
        within: Standard deviation of the logarithm of each trial's step time, as its own steps show it; 0 if not known.

    Returns:
        A standard deviation of the logarithm of the step time.
    """
    known = [sd for sd in within if sd > 0]
    return float(np.clip(BETWEEN_TRIALS * np.median(known), TIME_NOISE, LARGEST_NOISE)) if known else TIME_NOISE


def probability_below(mean: Floats, sd: Floats, limit: float) -> Floats:
    """Probability that the value is below a limit."""
    return np.asarray(scipy.special.ndtr((limit - mean) / sd), dtype=float)


def _kernel(a: Floats, b: Floats) -> Floats:
    squared = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None, :] - 2.0 * a @ b.T
    return np.asarray(np.exp(-0.5 * np.maximum(squared, 0.0)), dtype=float)


def _pairs(n: Floats) -> Floats:
    """Pairs that each number of things makes."""
    return np.asarray(n * (n - 1.0) / 2.0, dtype=float)
