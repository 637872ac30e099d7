"""What measurements say about a prior: a Gaussian process on log(measured / predicted), with linear features that have names."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, cholesky, solve_triangular
from scipy.special import log_ndtr, ndtr

Floats = NDArray[np.float64]

# Of the smooth remainder (standard deviation of the logarithm) and of the noise: what the marginal likelihood chooses
# from.
SMOOTH_SD = (0.05, 0.12, 0.3)
NOISE_SD = (0.012, 0.03, 0.08)
# By how much the linear coefficients may be larger than stated: a prior without any structure leaves all of it to them.
WIDER = (1.0, 3.0)
# How much each of these is believed before anything was measured (log probability, up to a constant).
LIKELY_SMOOTH = {0.05: -0.5, 0.12: 0.0, 0.3: -0.5}
LIKELY_NOISE = {0.012: -0.5, 0.03: 0.0, 0.08: -1.5}
MOST_FOR_CHOICE = 80
REWEIGHTINGS = 12
DAMPINGS = (1.0, 0.5, 0.25, 0.1, 0.03)
IMPUTATIONS = 4
LARGEST_CORRECTION = 4.0
JITTER = 1e-9
WIDEST, ENOUGH_TO_WIDEN = 2.0, 8


@dataclass(frozen=True, kw_only=True)
class Design:
    """Rows that a model can be asked about.

    Attributes:
        terms: What the prior adds up, one column a term; every row has a positive sum.
        linear: Features with a coefficient of their own.
        smooth: Coordinates in which the remainder is smooth, at a length scale of 1.
    """

    terms: Floats
    linear: Floats
    smooth: Floats

    def take(self, rows: NDArray[np.intp]) -> Design:
        """Some of the rows."""
        return Design(terms=self.terms[rows], linear=self.linear[rows], smooth=self.smooth[rows])

    def __len__(self) -> int:
        return len(self.terms)


@dataclass(frozen=True, kw_only=True)
class Data:
    """What was observed.

    Attributes:
        design: The rows observed.
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


class CalibratedGP:
    """What is believed after the observations; made by `fit`.

    The model is y = log(sum of terms x exp(correction of the term)) + linear features x coefficients + a smooth
    remainder (squared-exponential kernel) + noise. The corrections enter linearised at their best estimate
    (Gauss-Newton), so a wrong bandwidth in the prior is corrected where it matters and not everywhere.

    Args:
        linear_sd: Prior standard deviation of each linear coefficient.
        term_sd: Prior standard deviation of the correction of each term (of its logarithm).
        smooth_sd: Standard deviation of the remainder.
        noise_sd: Noise of a trial.

    Attributes:
        covered: Share of the observations in their 90 % interval, each foretold from the others; 0 before `check`.
    """

    def __init__(self, linear_sd: Floats, term_sd: Floats, smooth_sd: float = 0.1, noise_sd: float = 0.03) -> None:
        self.linear_sd, self.term_sd, self.smooth_sd, self.noise_sd = linear_sd, term_sd, smooth_sd, noise_sd
        self.correction = np.zeros(len(term_sd))
        self._wider = 1.0
        self.covered = 0.0
        self._data: Data | None = None

    def observe(self, data: Data, y: Floats | None = None) -> float:
        """Conditions on observations; returns the log marginal likelihood at the best corrections.

        Args:
            data: The observations.
            y: Values in place of `data.y`, where censored ones were filled in.
        """
        y = data.y if y is None else y
        self._data = data
        noise = self.noise_sd**2 * (data.group[:, None] == data.group[None, :]) + np.diag(data.extra_sd**2 + JITTER)
        remainder = self.smooth_sd**2 * _kernel(data.design.smooth, data.design.smooth) + noise
        self._correct(y, data.design, remainder)
        base, shares = self._prior(data.design)
        self._features = np.hstack([data.design.linear * self.linear_sd, shares * self.term_sd])
        target = y - base + shares @ self.correction
        self._factor = cho_factor(self._features @ self._features.T + remainder, lower=True)
        self._alpha = cho_solve(self._factor, target)
        self._weights = self._features.T @ self._alpha
        return float(-0.5 * target @ self._alpha - np.log(np.diag(self._factor[0])).sum())

    def _correct(self, y: Floats, design: Design, remainder: Floats) -> None:
        """The most likely corrections of the terms, everything else integrated out: damped Gauss-Newton from where they stand."""
        if not self.term_sd.any():
            return
        linear = design.linear * self.linear_sd
        lower = cholesky(linear @ linear.T + remainder, lower=True)

        def misfit(correction: Floats) -> tuple[float, Floats, Floats]:
            scaled = design.terms * np.exp(correction)
            total = scaled.sum(axis=1)
            white = solve_triangular(lower, np.column_stack([y - np.log(total), scaled / total[:, None]]), lower=True)
            return float(white[:, 0] @ white[:, 0] + ((correction / sd) ** 2).sum()), white[:, 0], white[:, 1:]

        sd = np.where(self.term_sd > 0, self.term_sd, 1e-6)
        cost, residual, slopes = misfit(self.correction)
        for _ in range(REWEIGHTINGS):
            scaled_slopes, at = slopes * sd, self.correction / sd
            move = sd * np.linalg.solve(
                scaled_slopes.T @ scaled_slopes + np.eye(len(sd)), scaled_slopes.T @ residual - at
            )
            for share in DAMPINGS:
                tried = np.clip(self.correction + share * move, -LARGEST_CORRECTION, LARGEST_CORRECTION)
                found = misfit(tried)
                if found[0] < cost:
                    break
            else:
                return
            settled = cost - found[0] < 1e-3
            self.correction, (cost, residual, slopes) = tried, found
            if settled:
                return

    def check(self) -> None:
        """Foretells each observation from the others; widens the intervals by as much as that shows them to be too narrow.

        Sets `covered`, the share of the observations that then lie in their 90 % interval.
        """
        inverse = cho_solve(self._factor, np.eye(len(self._alpha)))
        squared = self._alpha**2 / np.diag(
            inverse
        )  # leave-one-out errors in units of their own deviation (Rasmussen, Williams: 5.4.2)
        self._wider = float(np.clip(np.sqrt(squared.mean()), 1.0, WIDEST)) if len(squared) >= ENOUGH_TO_WIDEN else 1.0
        self.covered = float((np.sqrt(squared) <= 1.645 * self._wider).mean())

    def mean(self, design: Design) -> Floats:
        """The expected logarithm in each row without the smooth remainder: cheap for very many rows."""
        base = np.log(design.terms @ np.exp(self.correction))
        if self._data is None:
            return np.asarray(base, dtype=float)
        return np.asarray(base + design.linear @ (self.linear_sd * self._weights[: len(self.linear_sd)]), dtype=float)

    def remainder(self, design: Design) -> Floats:
        """What is expected in each row beyond the corrected terms, as a logarithm: what knobs and machine add to the formulas."""
        base, _ = self._prior(design)
        return np.asarray(self.predict(design)[0] - base, dtype=float)

    def predict(self, design: Design) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the logarithm in each row, noise not included."""
        base, shares = self._prior(design)
        features = np.hstack([design.linear * self.linear_sd, shares * self.term_sd])
        prior = (features**2).sum(axis=1) + self.smooth_sd**2
        if self._data is None:
            return base, np.sqrt(prior)
        cross = features @ self._features.T + self.smooth_sd**2 * _kernel(design.smooth, self._data.design.smooth)
        centre = base - shares @ self.correction + cross @ self._alpha
        explained = solve_triangular(self._factor[0], cross.T, lower=True)
        variance = np.maximum(prior - (explained**2).sum(axis=0), 1e-8)
        return np.asarray(centre, dtype=float), np.asarray(self._wider * np.sqrt(variance), dtype=float)

    def _prior(self, design: Design) -> tuple[Floats, Floats]:
        """The corrected prior in each row, and the share of each term in it, which is the derivative by its correction."""
        scaled = design.terms * np.exp(self.correction)
        total = scaled.sum(axis=1)
        return np.log(total), scaled / total[:, None]


def fit(data: Data | None, linear_sd: Floats, term_sd: Floats) -> CalibratedGP:
    """The posterior with the scales that the observations make most likely.

    Censored observations are filled in by their expectation under the model, again and again (Buckley and James, 1979).
    """
    if data is None or len(data.y) == 0 or data.censored.all():
        # Bounds alone teach too little to choose scales by; the filled-in values then rest on the prior.
        model = CalibratedGP(linear_sd, term_sd)
        if data is not None and len(data.y):
            _filled(model, data)
        return model
    first = np.unique(data.group, return_index=True)[
        1
    ]  # a trial's own value; what was derived from it would be foretold too well
    own = np.sort(first[~data.censored[first]])[-MOST_FOR_CHOICE:]
    some = replace(
        data,
        design=data.design.take(own),
        y=data.y[own],
        group=data.group[own],
        extra_sd=data.extra_sd[own],
        censored=data.censored[own],
    )
    best: tuple[float, CalibratedGP] | None = None

    def consider(smooth_sd: float, noise_sd: float, wider: float) -> None:
        nonlocal best
        model = CalibratedGP(linear_sd * wider, term_sd, smooth_sd, noise_sd)
        if best is not None:
            model.correction = best[1].correction.copy()  # a start near the answer
        likelihood = model.observe(some) + LIKELY_SMOOTH[smooth_sd] + LIKELY_NOISE[noise_sd]
        if best is None or likelihood > best[0]:
            best = likelihood, model

    # First the two that trade off against each other, then the noise.
    for smooth_sd, wider in itertools.product(SMOOTH_SD, WIDER):
        consider(smooth_sd, NOISE_SD[1], wider)
    assert best is not None
    chosen = best[1]
    for noise_sd in (NOISE_SD[0], NOISE_SD[2]):
        consider(
            chosen.smooth_sd, noise_sd, float(chosen.linear_sd.max() / linear_sd.max()) if linear_sd.any() else 1.0
        )
    best[1].check()
    _filled(best[1], data)
    return best[1]


def _filled(model: CalibratedGP, data: Data) -> None:
    if not data.censored.any():
        model.observe(data)
        return
    y, hidden = data.y.copy(), data.censored
    seen = np.flatnonzero(~hidden)
    if len(seen):
        known = replace(
            data,
            design=data.design.take(seen),
            y=y[seen],
            group=data.group[seen],
            extra_sd=data.extra_sd[seen],
            censored=hidden[seen],
        )
        model.observe(known)
    rows = data.design.take(np.flatnonzero(hidden))
    for _ in range(IMPUTATIONS):
        mean, sd = model.predict(rows)
        z = (data.y[hidden] - mean) / sd
        # E[m | m > c] = mean + sd phi(z) / (1 - Phi(z)), in logarithms so that a far tail stays finite.
        y[hidden] = np.maximum(data.y[hidden], mean + sd * np.exp(-0.5 * z**2 - 0.9189385332046727 - log_ndtr(-z)))
        model.observe(data, y)


def probability_below(mean: Floats, sd: Floats, limit: float) -> Floats:
    """Probability that the value is below a limit."""
    return np.asarray(ndtr((limit - mean) / sd), dtype=float)


def _kernel(a: Floats, b: Floats) -> Floats:
    squared = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None, :] - 2.0 * a @ b.T
    return np.asarray(np.exp(-0.5 * np.maximum(squared, 0.0)), dtype=float)
