"""The gradient noise scale, and the statistical efficiency of a batch that follows from it.

The ranks use it to end a measurement, the driver to score.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autotune.system.units import scale_for
from autotune.trial.result import NoiseTerms

REPLICATES = 1000
# Fewest steps for a bootstrap.
LEAST_STEPS = 8
# Stands for an infinite noise scale, or end of an interval; no batch comes near it.
ENDLESS = 1e15
# The noise scale counts as growing if the second half of a measurement shows more than this multiple of the first's.
GROWTH = 1.25
# A loss that falls by less than this share from one half of the steps to the other counts as constant.
STANDS = 0.005
# Over fewer steps, a constant loss cannot be distinguished from one that has not begun to fall.
LEAST_LOSSES = 50
# An interval wider than this, high over low, does not separate batches that differ by a factor of two.
WIDEST = 4.0


@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """The gradient noise scale: the batch, in samples, at which gradient noise and gradient are of one size.

    Attributes:
        samples: tr(Sigma) / |G|^2; `ENDLESS` where the gradient is lost in the noise.
        low: Lower end of its 95 % interval.
        high: Upper end; `ENDLESS` if the interval has none.
        resolved: The interval is narrow enough to compare batches by all of it; else only `low` may be believed.
        growing: It grew during the measurement, as it does near the initial weights; later it will be larger.
    """

    samples: float
    low: float
    high: float
    resolved: bool
    growing: bool = False

    @property
    def compares(self) -> bool:
        """Whether batches may be compared by it: where it is known from below alone, larger ones by their least worth."""
        return self.resolved or 0 < self.low < ENDLESS

    @property
    def precise(self) -> bool:
        """Whether more samples would change no decision: it is constant, and known to a factor of 1.5."""
        return self.resolved and not self.growing and self.high <= 1.5 * self.low

    def __str__(self) -> str:
        if not self.compares:
            lost = "no gradient shows in the noise" if self.low >= ENDLESS else "no noise shows in the gradient"
            return f"gradient noise scale: not to be told, since {lost}; the run was too short to say more"
        if not self.resolved:
            credit = "the run was too short to say more, so larger batches get the credit that is sure, and smaller ones none"
            return f"gradient noise scale: more than {self.low:,.0f} samples; {credit}"
        growing = ", and still growing, so that smaller batches get no credit for it" if self.growing else ""
        scale = scale_for("samples", (self.samples, self.low, self.high))
        ends = f"{scale.number(self.low)} to {scale.number(self.high)}"
        return f"gradient noise scale: {scale.quantity(self.samples)} ({ends}){growing}"


def noise_scale(
    micro_sq: Sequence[float], mean_sq: Sequence[float], *, micro_batch_size: int, n_micro: int
) -> NoiseScale:
    """Estimates the noise scale from the gradients of M equal micro-batches of b samples in each of several steps.

    With q = mean |g_i|^2 over the M micro-gradients and t = |mean g_i|^2 (McCandlish et al., arXiv 1812.06162, appendix
    A, with B_small = b and B_big = b M; the same as AdaptDL's):

        |G|^2 = (M t - q) / (M - 1),   tr(Sigma) = b M (q - t) / (M - 1),   noise scale = tr(Sigma) / |G|^2

    Each is unbiased in a single step but so noisy that a mean of ratios can come out negative: numerators and
    denominators are summed over the steps and divided last. The interval is a block bootstrap of the steps, since the
    gradient of neighbouring steps is taken at neighbouring weights.

    Args:
        micro_sq: q of each step, shape (steps,).
        mean_sq: t of each step, shape (steps,).
        micro_batch_size: b, samples.
        n_micro: M, accumulation steps times ranks; at least 2.

    Raises:
        ValueError: One micro-batch a step says nothing of noise.
    """
    if n_micro < 2:
        raise ValueError("the noise scale needs at least two micro-batches a step: more ranks or more accumulation")
    q, t = np.asarray(micro_sq, dtype=float), np.asarray(mean_sq, dtype=float)
    gradient = (n_micro * t - q) / (n_micro - 1)
    trace = micro_batch_size * n_micro * (q - t) / (n_micro - 1)
    if len(q) < LEAST_STEPS or not np.isfinite(q).all() or not np.isfinite(t).all():
        return NoiseScale(samples=ENDLESS, low=0.0, high=ENDLESS, resolved=False)
    value = _ratio(trace.sum(), gradient.sum())
    index = bootstrap(len(q), REPLICATES, np.random.default_rng(0))
    tops, bottoms = trace[index].sum(axis=1), gradient[index].sum(axis=1)
    drawn = np.where(bottoms > 0, np.maximum(tops, 0.0) / np.where(bottoms > 0, bottoms, 1.0), ENDLESS)
    low, high = (float(bound) for bound in np.quantile(drawn, (0.025, 0.975), method="nearest"))
    resolved = high < ENDLESS and low > 0 and high / low <= WIDEST
    return NoiseScale(samples=value, low=min(low, value), high=max(high, value), resolved=resolved)


def falling(losses: Sequence[float]) -> bool:
    """Whether the loss still falls, beyond its noise, over the last two thirds of the steps.

    While it falls the gradient shrinks, so a noise scale measured now, however narrow its interval, is too small.
    """
    if len(losses) < LEAST_LOSSES:
        return True
    kept = np.asarray(losses[len(losses) // 3 :], dtype=float)
    earlier, later = np.array_split(kept, 2)
    fall = earlier.mean() - later.mean()
    se = math.sqrt(earlier.var(ddof=1) / len(earlier) + later.var(ddof=1) / len(later))
    return bool(fall > max(STANDS * abs(later.mean()), 2 * se))


def _ratio(top: float, bottom: float) -> float:
    return max(0.0, top) / bottom if bottom > 0 else ENDLESS


def bootstrap(n: int, replicates: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Indices of a circular block bootstrap of `n` steps, one row a replicate: neighbouring steps err together."""
    length = max(1, round(n ** (1 / 3)))
    starts = rng.integers(0, n, size=(replicates, -(-n // length)))
    return ((starts[:, :, None] + np.arange(length)).reshape(replicates, -1) % n)[:, :n]


def efficiency(noise_samples: float, batch: float, baseline_batch: float) -> float:
    """Progress per sample at a global batch, relative to the baseline's: (phi + B0) / (phi + B) (Pollux, OSDI 2021).

    Above 1 where the batch is smaller than the baseline's. Goodput is throughput times this, and the time to a target
    that the baseline reaches in T is T x (goodput of the baseline) / goodput: S_min (1 + phi / B) steps of B samples
    each.

    Args:
        noise_samples: phi, in samples; with an `ENDLESS` one every sample counts in full.
        batch: B, samples of an optimizer step.
        baseline_batch: B0.
    """
    return (noise_samples + baseline_batch) / (noise_samples + batch)


def noise_scale_of(terms: NoiseTerms) -> NoiseScale:
    """The noise scale of a trial without the first third of its steps: near the initial weights it is far too small."""
    first = len(terms.micro_sq) // 3
    found = noise_scale(
        terms.micro_sq[first:], terms.mean_sq[first:], micro_batch_size=terms.micro_batch_size, n_micro=terms.n_micro
    )
    return replace(found, growing=_grows(terms, first))


def _grows(terms: NoiseTerms, first: int) -> bool:
    """Whether the later half of the steps shows a clearly larger noise scale than the earlier half."""
    middle = (first + len(terms.micro_sq)) // 2
    (q1, t1), (q2, t2) = (
        (sum(terms.micro_sq[part]), sum(terms.mean_sq[part])) for part in (slice(first, middle), slice(middle, None))
    )
    # Cross-multiplied: a gradient lost in the noise may come out at or below zero, and the noise scale as infinite.
    gradients = [max(terms.n_micro * t - q, 0.0) for q, t in ((q1, t1), (q2, t2))]
    return (q2 - t2) * gradients[0] > GROWTH * (q1 - t1) * gradients[1]
