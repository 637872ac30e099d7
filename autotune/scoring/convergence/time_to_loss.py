"""Training time until a trial reaches the loss that the baseline reached."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.scoring.convergence.noise_scale import NoiseScale, bootstrap
from autotune.scoring.quantiles import Z95
from autotune.scoring.rates import Estimate, rate_of
from autotune.trial.profile import Floats
from autotune.trial.result import TrialResult

# A candidate that did not reach the target is extrapolated to at most this many times the samples it saw.
EXTRAPOLATION_CAP = 10.0
REPLICATES = 200


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The baseline's final loss and noise scale, to which candidates are compared.

    Attributes:
        loss_target: Mean loss over the last `window_samples` of the baseline's trial; None if the loss did not fall.
        loss_target_sd: Standard error of the target.
        window_samples: Samples that losses are averaged over, the same for every candidate.
        batch: Samples of the baseline's optimizer step.
        noise: The gradient noise scale; None if it was not measured.
    """

    loss_target: float | None = None
    loss_target_sd: float = 0.0
    window_samples: float = 0.0
    problem: str = ""
    batch: int = 0
    noise: NoiseScale | None = None
    noise_problem: str = "it was not measured"

    @classmethod
    def of(cls, baseline: TrialResult) -> "Reference":
        """The reference that the baseline's trial gives.

        The window is the last quarter of its samples. The loss must have fallen from the first window to the last by
        more than twice the standard error of that difference, else no target is set: reaching it would mean nothing.
        """
        losses = _losses(baseline)
        batch = baseline.samples_per_step
        if losses is None or not batch:
            return cls(problem="the baseline's losses are missing or not finite", batch=batch or 0)
        if len(losses) < 4:
            # Whatever the trial's budget, more are trained, unless its deadline is near.
            few = f"the baseline trained {len(losses)} steps, too few for a loss curve"
            return cls(batch=batch, problem=f"{few}; --fresh with a longer --trial-deadline gives it time for more")
        n = max(1, len(losses) // 4)
        target = float(losses[-n:].mean())
        error = _standard_error(losses, n)
        if float(losses[:n].mean()) - target <= 2 * math.sqrt(2) * error:
            return cls(
                batch=batch,
                problem="the baseline's loss did not fall during its trial; raise trial_budget_s in study.yaml",
            )
        return cls(batch=batch, loss_target=target, loss_target_sd=error, window_samples=float(n * batch))


def time_to_loss(result: TrialResult, reference: Reference | None) -> Estimate | None:
    """Seconds of training until the loss reaches the baseline's final loss.

    Near the initial weights this metric favours small batches.

    For a trial with B samples per step and losses l_1 .. l_n (equal seed and data order in all trials of a study):

    * The loss curve is averaged over the same number of *samples* W in all trials (`reference.window_samples`, at
      least B), since a loss over B samples has noise of sd / sqrt(B). With C(s) the summed loss of the first s samples,
      L(s) = (C(s) - C(s - W)) / W.
    * l_i is the loss of the weights after (i - 1) B samples, so the mean weights behind L(s) have seen
      x(s) = s - (W + B) / 2 samples; without that term large batches would look late. For s < W the window is s.
    * x* is where L crosses the target, linear between steps; where noise makes it cross more than once, the mean of the
      first and the last crossing, as the first alone comes early. time = x* / throughput.
    * If the trial ends above the target, the loss is extrapolated, linear in log(samples) as fitted over all but the
      first quarter of the trial (the second half alone has four times the error in simulation), to at most 10 times the
      samples seen; the estimate is then `censored` and its interval goes up to that cap.
    * The interval is that of a block bootstrap of the residuals about the averaged curve (fixed seed), with the error
      of the target and of the step time drawn along.

    Limits: a window of W on a convex curve reads high where the curve is steep, which counts against candidates that
    reach the target within less than about W samples; the extrapolation knows no plateau; the target is one trial's,
    and what is reached sooner in training loss need not generalise as well.
    """
    losses = _losses(result)
    batch, steps = result.samples_per_step, result.steps
    if losses is None or not batch or steps is None or reference is None or reference.loss_target is None:
        return None
    window = max(reference.window_samples, float(batch))
    position, smooth = _smoothed(losses[None, :], batch, window)
    seen = float(len(losses) * batch)
    samples, censored = _reached(position, smooth, np.array([reference.loss_target]), losses[None, :], seen, batch)
    rng = np.random.default_rng(0)
    replicas = _replicas(losses, batch, window, rng)
    targets = reference.loss_target + reference.loss_target_sd * rng.standard_normal(len(replicas))
    drawn, _ = _reached(*_smoothed(replicas, batch, window), targets, replicas, seen, batch)
    rate = rate_of(result, "samples")
    step_s = batch / rate.value if rate is not None else steps.median_s
    spread = (math.log(rate.high / rate.low) / 2 if rate is not None else steps.relative_ci) / Z95
    drawn_s = drawn / batch * step_s * np.maximum(0.0, 1 + spread * rng.standard_normal(len(replicas)))
    value = float(samples[0]) / batch * step_s
    low, high = (float(bound) for bound in np.quantile(drawn_s, (0.025, 0.975)))
    if censored[0]:
        high = max(high, EXTRAPOLATION_CAP * seen / batch * step_s)
    # A tenth stands for an end at zero, of which there is no logarithm, by which trials are compared.
    low = max(value / 10, min(low, value))
    return Estimate(value=value, low=low, high=max(high, value), censored=bool(censored[0]))


def _losses(result: TrialResult) -> Floats | None:
    """The trial's losses; None without any, and where the last one, at which a trial ends then, is not finite."""
    found = np.array(result.losses, dtype=float)  # None becomes NaN
    return found if len(found) and np.isfinite(found).all() else None


def _smoothed(losses: Floats, batch: int, window: float) -> tuple[Floats, Floats]:
    """Samples that the averaged weights have seen (x), and the loss averaged over the window (L), at each step's end.

    Args:
        losses: One row for each replicate of the curve.
        batch: Samples per step.
        window: Samples to average over.
    """
    n = losses.shape[1]
    total = np.concatenate([np.zeros((len(losses), 1)), np.cumsum(losses, axis=1) * batch], axis=1)
    ends = np.arange(1, n + 1) * float(batch)
    widths = np.minimum(window, ends)
    start = (ends - widths) / batch
    whole = np.minimum(start.astype(int), n - 1)
    before = total[:, whole] + (start - whole) * (total[:, whole + 1] - total[:, whole])
    return ends - (widths + batch) / 2, np.asarray((total[:, 1:] - before) / widths, dtype=float)


def _reached(
    position: Floats, smooth: Floats, targets: Floats, losses: Floats, seen: float, batch: int
) -> tuple[Floats, NDArray[np.bool_]]:
    """For each row, the samples at which the target is reached, and whether that is extrapolated."""
    above = smooth > targets[:, None]
    below_at_end = ~above[:, -1]
    first = np.argmax(~above, axis=1)
    last = smooth.shape[1] - np.argmax(above[:, ::-1], axis=1)
    last = np.where(above.any(axis=1), last, 0)
    last = np.minimum(last, smooth.shape[1] - 1)
    crossing = (_crossing(position, smooth, targets, first) + _crossing(position, smooth, targets, last)) / 2
    beyond = _extrapolated(losses, targets, float(position[-1]), seen, batch)
    return np.where(below_at_end, crossing, beyond), ~below_at_end


def _crossing(position: Floats, smooth: Floats, targets: Floats, index: NDArray[np.intp]) -> Floats:
    rows = np.arange(len(smooth))
    before = np.maximum(index - 1, 0)
    high, low = smooth[rows, before], smooth[rows, index]
    share = np.where(high > low, (high - targets) / np.where(high > low, high - low, 1.0), 1.0)
    return np.asarray(position[before] + np.clip(share, 0.0, 1.0) * (position[index] - position[before]), dtype=float)


def _extrapolated(losses: Floats, targets: Floats, last: float, seen: float, batch: int) -> Floats:
    """Where the loss, linear in log samples over all but the first quarter of the trial, meets the target."""
    n = losses.shape[1]
    cap = EXTRAPOLATION_CAP * seen
    first = n // 4
    if n - first < 2:
        return np.full(len(losses), cap)
    logs = np.log((np.arange(first, n) + 0.5) * batch)
    centred = logs - logs.mean()
    slope = losses[:, first:] @ centred / float(centred @ centred)
    level = losses[:, first:].mean(axis=1)
    falling = slope < 0
    distance = np.where(falling, (targets - level) / np.where(falling, slope, -1.0), math.inf)
    meets = np.exp(np.minimum(logs.mean() + distance, math.log(cap)))
    return np.asarray(np.clip(meets, last, cap), dtype=float)


def _replicas(losses: Floats, batch: int, window: float, rng: np.random.Generator) -> Floats:
    """Bootstrap curves: the trend plus residuals drawn in blocks, since neighbouring steps err together."""
    n = len(losses)
    half = max(1, round(window / batch / 4))
    trend = _centred_mean(losses, half)
    residuals = losses - trend
    index = bootstrap(n, REPLICATES, rng)
    # A mean over 2 half + 1 points takes that share of the noise with it; put it back.
    return np.asarray(trend + residuals[index] / math.sqrt(1 - 1 / (2 * half + 1)), dtype=float)


def _centred_mean(values: Floats, half: int) -> Floats:
    """Mean over the neighbours at equal distance on both sides, fewer towards the ends, so that a slope is kept."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    reach = np.minimum(half, np.minimum(index, len(values) - 1 - index))
    return np.asarray((total[index + reach + 1] - total[index - reach]) / (2 * reach + 1), dtype=float)


def _standard_error(losses: Floats, n: int) -> float:
    """Standard error of a mean of n losses, from differences of neighbours, which hardly see the trend."""
    return float(np.sqrt(np.mean(np.diff(losses[len(losses) // 2 :]) ** 2) / 2 / n))
