"""The quality gate: whether a configuration with other numerics trains as well as a reference, by loss and gradient."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autotune.scoring.convergence.branch import slope_of
from autotune.space.candidate import Candidate
from autotune.space.deepspeed import RATE_KEYS
from autotune.trial.profile import Floats
from autotune.trial.result import NOT_FINITE, GradientCheck
from autotune.trial.workload import Workload

# A mean loss may lag by one step (DeepSpeed's bf16 stage 0 loses a quarter of Adam's first one), or by this share of
# all steps.
LAG_STEPS, LAG_SHARE = 1.0, 0.02
# Shorter curves are not compared.
LEAST_STEPS = 8
# One-sided probability that a mean lies beyond the band of the replicates by chance.
CHANCE = 0.01
# A gradient that is off by more than three roundings to bfloat16 together would make: one costs 0.17 %, a sum of 64
# micro-steps 0.6 to 1 %.
WORST_ERROR = 0.005
# Weights, data and step are the same, so the gradients of the first step are of one size, whatever dropout does.
WIDEST_NORM_RATIO = 2.0
# Within this factor of the ratio of micro-steps it is that of sums in place of means.
ALIKE_RATIO = 1.3
NO_REFERENCE = "its numerics could not be checked: a loss of the baseline's numerics is not finite"
# First losses of equal runs of a script differ by less than this share of the losses: only the weights are rounded otherwise.
ONE_START = 0.05
# Keys of a DeepSpeed configuration that change which numbers are computed, not only where and when.
NUMERIC_KEYS = (
    "bf16", "fp16", "torch_autocast", "communication_data_type", "gradient_predivide_factor", "prescale_gradients",
    "expert_parallel",  # AutoEP replaces the model's layers with others
)  # fmt: skip
# Keys that change how weights follow from gradients. Of their settings some only change where the optimizer computes, and learning
# rates follow the batch of a trial: those do not count.
UPDATE_KEYS = ("optimizer", "scheduler", "gradient_clipping", "gradient_allreduce_op")
UNCOUNTED = frozenset(("torch_adam", "fused", "foreach", "capturable", *RATE_KEYS))
# Numbers of a 16-bit type are up to this share apart. A loss in it is off by as much as two of these steps, since a mean over
# thousands of tokens, added up in it, is biased, as torch does on a CPU.
COARSE = {"bfloat16": 2 * 2.0**-7, "float16": 2 * 2.0**-10}
# How many micro-steps' gradients are added up with 16 bits.
SUMMED_IN_16_BITS = "accumulated in 16 bits"
# Of `zero_optimization`. They carry the error of one step over to the next: single gradients are off, their sum is not.
QUANTISED = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")


@dataclass(frozen=True, kw_only=True)
class GateVerdict:
    """The gate's verdict on a candidate.

    Attributes:
        passed: Whether it trains as well as the reference; None if that could not be measured.
        excess: Mean loss over the later half of the steps, over the reference's; over the earlier half where that was
            outside.
        limit: What it may be at most, either way.
        losses: The reference's curve.
        replicates: The curves of its replicates.
        batch: Samples of a step.
        same_as: The trial with the same numerics whose curve was compared, where it was not the candidate's own.
        gradient_error: Relative error of the candidate's first gradient, where that decided and no curve was trained.
    """

    passed: bool | None
    reason: str = ""
    excess: float = 0.0
    limit: float = 0.0
    n_steps: int = 0
    losses: list[float] = field(default_factory=list)
    replicates: list[list[float]] = field(default_factory=list)
    batch: int = 0
    same_as: int | None = None
    gradient_error: float | None = None

    @property
    def compared(self) -> str:
        """How far apart the curves were, and up to which difference they could not be told apart, in words."""
        if self.gradient_error is not None:
            return f"the first sum is off by {self.gradient_error:.2%} (rounding it once costs 0.17 %)"
        whose = (
            "the loss" if self.same_as is None else f"the loss of trial {self.same_as}, whose numerics are the same,"
        )
        level = float(np.mean(self.losses[self.n_steps // 2 :])) if self.losses else math.nan
        share = f" ({100 * self.limit / abs(level):.2g} % of the loss)" if math.isfinite(level) and level else ""
        fallen = float(np.mean(self.losses[: max(1, self.n_steps // 8)])) - level if self.losses else math.inf
        little = ", and the loss fell by no more than that, so these steps show little" if self.limit >= fallen else ""
        apart = f"{abs(self.excess):.2g} {'above' if self.excess > 0 else 'below'}" if self.excess else "equal to"
        return (
            f"over {self.n_steps} steps {whose} is {apart} the reference's;"
            f" up to {self.limit:.2g}{share} either way could not have been told from chance{little}"
        )


def numerics(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a complete DeepSpeed configuration that change the computed numbers."""
    found: dict[str, Any] = {}
    for key in NUMERIC_KEYS:
        value = config.get(key)
        if isinstance(value, Mapping):
            value = dict(value) if value.get("enabled") else None
        if value not in (None, False):
            found[key] = value
    found |= {key: _update(config[key]) for key in UPDATE_KEYS if config.get(key) is not None}
    found |= {name: True for name in QUANTISED if (config.get("zero_optimization") or {}).get(name)}
    dtype = (config.get("data_types") or {}).get("grad_accum_dtype")
    if "bf16" in found or "fp16" in found:
        steps = int(config.get("gradient_accumulation_steps") or 1)
        found |= {"gradients": str(dtype)} if dtype is not None else {SUMMED_IN_16_BITS: steps} if steps > 1 else {}
    return found


def _update(value: Any) -> Any:
    """The value of one of `UPDATE_KEYS`, without the settings that do not count."""
    if not isinstance(value, Mapping):
        return value
    params = {name: each for name, each in (value.get("params") or {}).items() if name not in UNCOUNTED}
    return {"type": str(value.get("type")).lower(), "params": params}


def keeps_numerics(config: Mapping[str, Any], baseline: Mapping[str, Any]) -> bool:
    """Whether a configuration computes the numbers that a baseline computes, or sums up fewer of them in 16 bits."""
    n_own, n_other = (numerics(each).get(SUMMED_IN_16_BITS, 1) for each in (config, baseline))
    return differs_in_sums_alone(config, baseline) and n_own <= n_other


def trains_alike(
    candidate: Candidate, baseline: Candidate, config: Mapping[str, Any], own: Mapping[str, Any], workload: Workload
) -> bool:
    """Returns whether a candidate trains with the baseline's numerics; the global batch may differ.

    Args:
        config: The candidate's complete DeepSpeed configuration.
        own: The baseline's complete DeepSpeed configuration.
    """
    return (
        keeps_numerics(config, own)
        and candidate.other_numerics == baseline.other_numerics
        and not workload.scales_otherwise(candidate, baseline)
        and not workload.updates_otherwise(candidate, baseline)
    )


def differs_in_sums_alone(config: Mapping[str, Any], baseline: Mapping[str, Any]) -> bool:
    """Whether two configurations compute the same numbers, but for how many gradients they sum up in 16 bits."""
    own, other = ({k: v for k, v in numerics(each).items() if k != SUMMED_IN_16_BITS} for each in (config, baseline))
    return own == other


def judge_sum(found: GradientCheck | None, batch: int) -> GateVerdict | None:
    """The pass of a configuration that only sums up more gradients in 16 bits, if its first sum is right; else None.

    The rounding of a sum shows in the gradient itself, which each trial compares with its micro-gradients.
    """
    if found is None or not found.error <= WORST_ERROR:
        return None
    return GateVerdict(passed=True, gradient_error=found.error, batch=batch)


def judge(
    losses: Sequence[float | None],
    reference: Sequence[float | None],
    replicates: Sequence[Sequence[float | None]],
    batch: int = 0,
    *,
    may_be_lower: bool = False,
    loss_dtype: str = "",
) -> GateVerdict:
    """Compares a loss curve with a reference's: equal weights, data and global batch, step by step.

    The statistic is the mean difference over the earlier and over the later half of the steps both have. It is outside
    if, either way, it is beyond each of

    * the band: what two replicates of the reference (other roundings, other dropout) differ by, with Student's factor
      for their number;
    * three standard errors of the difference itself, over blocks of steps, where the curves cannot be paired step by
      step;
    * a lag of one step, or of 2 % of the steps, in the reference's own slope: a shortened first step is no worse
      numerics.

    A loss that is far lower is outside too: other numerics do not train better, but a wrong learning rate may, for a
    while. What a loss in 16 bits cannot tell apart is not decided.

    Args:
        losses: The candidate's, one a step.
        batch: Samples of a step, for the record.
        may_be_lower: A lower loss is no fault: the same numerics saw the samples in another order.
        loss_dtype: Type with 16 bits that one of the two computes its loss in; empty for others.
    """
    curves = [np.array(curve, dtype=float) for curve in (losses, reference, *replicates)]  # None becomes NaN
    n = min((len(curve) for curve in curves), default=0)
    base_losses, *other_losses = (curve[:n].tolist() for curve in curves[1:])
    kept = {"n_steps": n, "losses": base_losses, "replicates": other_losses, "batch": batch}
    if n < LEAST_STEPS:
        # A check has the time for more, unless its deadline is near.
        few = f"{n} steps are too few to compare loss curves; --fresh with a longer --trial-deadline gives more"
        return GateVerdict(passed=None, reason=few, **kept)
    own, base, *others = (curve[:n] for curve in curves)
    if not np.isfinite([base, *others]).all():  # nothing lies outside of what is no number
        return GateVerdict(passed=None, reason=NO_REFERENCE, n_steps=n, batch=batch)
    if not np.isfinite(own).all():
        return GateVerdict(passed=False, reason="its loss is not finite where the reference's is", **kept)
    found = GateVerdict(passed=True, **kept)
    for part in (slice(n // 8, n // 2), slice(n // 2, n)):
        difference = (own - base)[part]
        excess, slope = float(difference.mean()), _slope(base, part)
        limit = max(
            max(LAG_STEPS, LAG_SHARE * n) * slope, _band([base, *others], part), 3 * _standard_error(difference)
        )
        found = replace(found, excess=excess, limit=limit)
        if excess > limit or (excess < -limit and not may_be_lower):
            level = float(np.abs(base[part]).mean())
            if abs(excess) <= COARSE.get(loss_dtype, 0.0) * level:
                return replace(found, passed=None, reason=_too_coarse(excess, level, loss_dtype))
            return replace(found, passed=False, reason=_outside(excess, limit, slope, part))
    return found


def starts_anew(curves: Sequence[Sequence[float | None]]) -> str:
    """The remedy where equal runs of a script begin with other weights or samples each time; empty where they do not."""
    first = [float(curve[0]) for curve in curves if curve and curve[0] is not None]
    scale = np.nanmean(np.abs(np.array([loss for curve in curves for loss in curve], dtype=float))) if first else 0.0
    if not first or max(first) - min(first) <= ONE_START * scale:
        return ""
    return (
        f"equal runs of the script begin with losses of {', '.join(f'{loss:.3g}' for loss in first)}: it draws weights or"
        " samples anew in each run, so no loss curves compare; seed it with a constant while it is tuned"
    )


def _too_coarse(excess: float, level: float, loss_dtype: str) -> str:
    return (
        f"its numerics could not be checked: its loss is {abs(excess):.2g} {'above' if excess > 0 else 'below'} the reference's,"
        f" and one of the two is computed in {loss_dtype}, which is too coarse at {level:.3g} to show so little; compute the"
        " loss in fp32, as from `output.float()`"
    )


def _outside(excess: float, limit: float, slope: float, part: slice) -> str:
    """The fault of a curve, in words."""
    where = f"over steps {part.start + 1} to {part.stop}"
    if excess < 0:
        return (
            f"trains differently: {where} its loss is {-excess:.3g} below the reference's, and only {limit:.3g} could be"
            " chance; other numerics do not train better, so check its learning rate"
        )
    behind = f", {excess / slope:.1f} steps behind" if slope > 0 else ""
    above = f"{where} its loss is {excess:.3g} above the reference's{behind}"
    return f"trains worse: {above}; up to {limit:.3g} could be chance"


def judge_gradient(found: GradientCheck | None, reference: GradientCheck | None, config: Mapping[str, Any]) -> str:
    """The fault of a candidate's first gradient, in words; empty without one.

    Losses cannot show all of it: Adam divides any wrong scale out again until it overflows, and bf16 sums over many
    micro-steps lose what only a long training misses.
    """
    if found is None:
        return ""
    if max(found.error, found.norm) >= NOT_FINITE:
        return "its first gradient is not finite"
    if found.error > WORST_ERROR and not numerics(config).keys() & {*QUANTISED}:
        what = f"the sum of {found.n_micro} micro-gradients" if found.n_micro > 1 else "its gradient"
        why = f"{what} is off by {found.error:.2%} (rounding it to bfloat16 once costs 0.17 %)"
        return f"loses gradient: {why}; accumulate in fp32"
    if reference is not None and reference.norm > 0:
        ratio = found.norm / reference.norm
        if not 1 / WIDEST_NORM_RATIO <= ratio <= WIDEST_NORM_RATIO:
            said = f"scales gradients wrongly: that of the first step is {ratio:.3g} times the reference's"
            steps = found.n_micro / max(1, reference.n_micro)
            if steps != 1 and 1 / ALIKE_RATIO < ratio / steps < ALIKE_RATIO:
                said += (
                    f", as {found.n_micro} to {reference.n_micro} micro-steps: the training adds up what it should average"
                    " (divide each loss by the number of micro-steps), or depends on the micro-batch, as BatchNorm does"
                )
            return said
    return ""


def _slope(base: Floats, part: slice) -> float:
    """Loss that a step may gain in the middle of a part of the curve.

    From the fit of a + b log(step) to all but the first steps, with its standard error, since what differs between
    batches hides the slope but not the lag of a curve on the same batches; or from the mean fall up to the part's end
    where that is steeper; at least a tenth of the mean fall a step over all: a noisy end has no slope.
    """
    n = len(base)
    first = n // 8
    rate, error = slope_of(base[first:], np.log(np.arange(first, n) + 1.0))
    fitted = (error - rate) / ((part.start + part.stop) / 2)
    start, end = float(base[: max(1, first)].mean()), float(base[-max(1, n // 4) :].mean())
    early = (start - float(base[n // 2 :].mean())) / (0.7 * n) if part.stop <= n // 2 else 0.0
    return float(max(fitted, early, (start - end) / n / 10, 0.0))


def _band(curves: Sequence[Floats], part: slice) -> float:
    """Bound on the mean difference between two curves of one configuration."""
    from scipy import special

    n = len(curves)
    if n < 2:
        return 0.0
    means = np.array([curve[part].mean() for curve in curves])
    # The difference of two has twice the variance of one.
    return float(special.stdtrit(n - 1, 1 - CHANCE) * means.std(ddof=1) * math.sqrt(2))


def _standard_error(difference: Floats) -> float:
    """Standard error of the mean of a series whose neighbours are alike: from the means of blocks."""
    size = max(1, round(len(difference) ** 0.5))
    n = len(difference) // size
    if n < 2:
        return 0.0
    blocks = difference[len(difference) - n * size :].reshape(n, size).mean(axis=1)
    return float(blocks.std(ddof=1) / math.sqrt(n))
