"""The quality gate on loss curves whose truth is known."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.scoring.convergence.quality_gate import (
    LEAST_STEPS,
    _standard_error,
    differs_in_sums_alone,
    judge,
    judge_gradient,
    judge_sum,
    keeps_numerics,
    numerics,
    starts_anew,
)
from autotune.space.candidate import Candidate
from autotune.trial.result import NOT_FINITE, GradientCheck

STEPS = 60


def curve(steps: int = STEPS, *, lag: float = 0.0, chaos: float = 1e-4, data: int = 0, seed: int = 0) -> list[float]:
    """A loss that falls with the logarithm of the step, the noise of the data in it, and what rounding makes of it."""
    at = np.arange(steps) + 1.0
    shift = np.minimum(lag, at - 0.5)
    batches = 0.08 * np.random.default_rng(1000 + data).standard_normal(steps)
    rounding = chaos * np.cumsum(np.random.default_rng(seed).standard_normal(steps)) / math.sqrt(steps)
    return list(4.3 - 0.5 * np.log(at - shift + 1) + batches + rounding)


def replicates(**what: float) -> list[list[float]]:
    return [curve(seed=100 + k, **what) for k in range(2)]


def test_hundred_clean_pairs_pass() -> None:
    """Other data, other roundings, quiet and chaotic training: fewer than 2 of 100 may be refused."""
    refused = 0
    for n in range(100):
        chaos = 10 ** (-5 + n % 4)  # 1e-5 to 1e-2
        others = [curve(data=n, chaos=chaos, seed=9000 + 10 * n + k) for k in range(3)]
        refused += not judge(curve(data=n, chaos=chaos, seed=n), others[0], others[1:]).passed
    assert refused < 2


@pytest.mark.parametrize("sign", [1, -1])
def test_a_loss_in_16_bits_is_neither_better_nor_worse_by_what_they_cannot_show(sign: int) -> None:
    """bfloat16 steps by 0.031 from 4 to 8; a mean of cross entropies in it was 0.036 lower, and called a wrong learning rate."""
    base, off = ([5.7 - 0.0001 * n + by for n in range(STEPS)] for by in (0.0, sign * 0.036))
    others = [[loss + 1e-5 * k for loss in base] for k in (1, 2)]
    assert judge(off, base, others).passed is False
    found = judge(off, base, others, loss_dtype="bfloat16")
    assert found.passed is None and "bfloat16" in found.reason and "output.float()" in found.reason
    far = [loss + sign * 0.2 for loss in base]
    assert judge(far, base, others, loss_dtype="bfloat16").passed is False
    assert judge(off, base, others, loss_dtype="float16").passed is False


@pytest.mark.parametrize("lag", [3.0, 6.0, 12.0])
def test_what_is_several_steps_behind_is_refused_with_the_lag_in_words(lag: float) -> None:
    found = judge(curve(lag=lag, seed=1), curve(seed=2), replicates(), batch=16)
    assert found.passed is False and found.excess > found.limit
    assert "trains worse: over steps" in found.reason and "steps behind" in found.reason and found.batch == 16
    assert found.losses == curve(seed=2) and len(found.replicates) == 2


def test_a_shortened_first_step_is_no_worse_numerics() -> None:
    """DeepSpeed's bf16 stage 0 takes a zero-gradient step before the first, so that Adam's first one is a quarter short."""
    assert judge(curve(lag=0.3, seed=1), curve(seed=2), replicates()).passed


def test_most_of_a_step_behind_is_no_fault_where_the_loss_falls_exponentially() -> None:
    """The fit of a logarithm has too small a slope there; the mean fall of the early steps has not."""
    at = np.arange(48.0)
    for tau in (6, 8):
        late, base = (1 + 3 * np.exp(-np.maximum(at - lag, 0) / tau) for lag in (0.8, 0.0))
        assert judge(late, base, []).passed


def test_after_a_fall_in_the_first_steps_a_little_above_it_is_no_fault() -> None:
    """Less than a tenth of the mean fall of a step; the later half has no slope of its own."""
    at = np.arange(48)
    base = np.where(at < 6, 5 - 0.6 * at, 1.0)
    assert judge(base + 0.005 * (at >= 24), base, []).passed
    assert not judge(base + 0.02 * (at >= 24), base, []).passed


def test_differences_that_come_in_runs_tell_less_than_as_many_by_themselves() -> None:
    """Sixteen runs of sixteen equal differences, whose standard error is that of sixteen."""
    difference = np.random.default_rng(0).standard_normal(16)
    expected = difference.std(ddof=1) / 4
    assert _standard_error(difference.repeat(16)) == pytest.approx(expected, rel=1e-9)


def test_a_loss_that_is_far_lower_is_no_numerics_either_and_the_learning_rate_is_asked_for() -> None:
    found = judge(list(np.array(curve(seed=1)) - 0.3), curve(seed=2), replicates())
    assert not found.passed and "check its learning rate" in found.reason
    assert judge(list(np.array(curve(seed=1)) - 1e-3), curve(seed=2), replicates()).passed
    reordered = judge(list(np.array(curve(seed=1)) - 0.3), curve(seed=2), replicates(), may_be_lower=True)
    assert reordered.passed and reordered.excess < 0
    assert not judge(list(np.array(curve(seed=1)) + 0.3), curve(seed=2), replicates(), may_be_lower=True).passed


def test_curves_that_are_not_paired_are_told_apart_by_their_noise() -> None:
    """Other dropout and other batches: the noise of the data stays in the difference, and the replicates show how much."""
    others = [curve(data=n) for n in (1, 2)]
    assert judge(curve(data=3), curve(), others).passed
    assert not judge(curve(data=3, lag=25.0), curve(), others).passed


def test_without_replicates_the_difference_itself_says_how_noisy_it_is() -> None:
    assert judge(curve(data=3), curve(), []).passed
    assert not judge(curve(lag=6.0), curve(seed=1), []).passed


def test_a_pass_says_which_difference_it_could_have_seen_and_where_that_is_little() -> None:
    """A loss that swings by more than it falls passes with almost any numerics."""
    quiet = judge(curve(seed=1), curve(seed=2), replicates())
    assert (
        "% of the loss) either way could not have been told from chance" in quiet.compared
        and "show little" not in quiet.compared
    )
    same = judge(curve(seed=1), curve(seed=1), replicates())
    assert "the loss is equal to the reference's;" in same.compared  # it was 0 below it
    flat, *others = (list(2.0 + np.random.default_rng(n).standard_normal(STEPS)) for n in range(4))
    wild = judge(flat, others[0], others[1:])
    assert wild.passed and "the loss fell by no more than that, so these steps show little" in wild.compared
    still = judge([0.0] * STEPS, [0.0] * STEPS, [[0.0] * STEPS] * 2)  # nothing trains
    assert still.passed and "so these steps show little" in still.compared


def smooth(steps: int, lag: float = 0.0) -> np.ndarray:
    """A curve without any noise."""
    return np.asarray(4.0 - 0.5 * np.log(np.arange(steps) + 21.0 - lag))


@pytest.mark.parametrize(
    ("steps", "lag", "passed"), [(40, 0.5, True), (40, 1.5, False), (400, 7.0, True), (400, 9.5, False)]
)
def test_a_curve_may_lag_by_one_step_or_by_two_percent_of_all(steps: int, lag: float, passed: bool) -> None:
    assert judge(smooth(steps, lag).tolist(), smooth(steps).tolist(), []).passed is passed


@pytest.mark.parametrize(
    ("part", "said"), [(slice(5, 20), "over steps 6 to 20"), (slice(20, 40), "over steps 21 to 40")]
)
def test_a_curve_is_outside_where_either_half_is(part: slice, said: str) -> None:
    own = smooth(40)
    own[part] += 0.1
    found = judge(own.tolist(), smooth(40).tolist(), [])
    assert found.passed is False and said in found.reason and found.excess == pytest.approx(0.1)


def test_replicates_give_the_band_by_students_factor_for_so_few() -> None:
    found = judge([2.0] * 16, [2.0] * 16, [[2.1] * 16, [1.9] * 16])
    assert found.passed and found.limit == pytest.approx(6.9646 * 0.1 * math.sqrt(2), rel=1e-4)  # t(2), 99 %


def test_a_loss_that_is_not_finite_is_refused() -> None:
    assert judge([*curve()[:-1], math.nan], curve(), replicates()).passed is False
    found = judge([*curve()[:-1], None], curve(), replicates())
    assert found.passed is False
    json.dumps(vars(found), allow_nan=False)  # it is kept as a file


def test_too_short_curves_say_nothing() -> None:
    found = judge(curve()[: LEAST_STEPS - 1], curve(), replicates())
    assert found.passed is None and "7 steps are too few" in found.reason and "--trial-deadline" in found.reason


@given(st.floats(0.1, 10), st.floats(-5, 5))
def test_the_verdict_knows_no_unit_of_loss(scale: float, offset: float) -> None:
    def moved(values: list[float]) -> list[float]:
        return [scale * value + offset for value in values]

    for lag in (0.0, 6.0):
        found = judge(moved(curve(lag=lag, seed=1)), moved(curve(seed=2)), [moved(each) for each in replicates()])
        assert found.passed is (lag == 0)


CLEAN = GradientCheck(error=0.0019, norm=2.0, n_micro=4)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (GradientCheck(error=0.0065, norm=2.0, n_micro=128), "the sum of 128 micro-gradients is off by 0.65%"),
        (GradientCheck(error=0.6, norm=1.2, n_micro=1), "its gradient is off by 60.00%"),
        (GradientCheck(error=0.0, norm=2048.0, n_micro=1), "1.02e+03 times the reference's"),
        (GradientCheck(error=0.0, norm=4.1, n_micro=1), "2.05 times the reference's"),
        (GradientCheck(error=0.0, norm=0.01, n_micro=1), "0.005 times the reference's"),
        (GradientCheck(error=0.0, norm=0.55, n_micro=1), "as 1 to 4 micro-steps: the training adds up"),
        (GradientCheck(error=0.0051, norm=2.0, n_micro=1), "its gradient is off by 0.51%"),
        (GradientCheck(error=NOT_FINITE, norm=2.0, n_micro=1), "not finite"),
        (GradientCheck(error=0.0, norm=NOT_FINITE, n_micro=1), "not finite"),
    ],
)
def test_a_gradient_that_is_not_what_was_computed_is_refused(found: GradientCheck, said: str) -> None:
    assert said in judge_gradient(found, CLEAN, {})


def test_a_gradient_that_was_rounded_once_or_carries_its_error_on_is_not() -> None:
    assert judge_gradient(CLEAN, CLEAN, {}) == "" and judge_gradient(None, CLEAN, {}) == ""
    zero = GradientCheck(error=0.0, norm=0.0, n_micro=1)
    assert (
        judge_gradient(zero, zero, {})
        == judge_gradient(GradientCheck(error=0.0049, norm=3.9, n_micro=1), CLEAN, {})
        == ""
    )
    quantised = {"zero_optimization": {"zero_quantized_gradients": True}}
    assert judge_gradient(GradientCheck(error=0.4, norm=2.0, n_micro=1), CLEAN, quantised) == ""
    nothing = GradientCheck(error=1.0, norm=0.0, n_micro=2 * CLEAN.n_micro)
    assert "is 0 times the reference's" in judge_gradient(nothing, CLEAN, quantised)


def config(**values: object) -> dict:
    return Candidate.of({"micro_batch_size": 4, **values}).to_deepspeed({})


@pytest.mark.parametrize(
    "values",
    [{"zero_stage": 3}, {"checkpoint_every": 1}, {"micro_batch_size": 2, "gradient_accumulation_steps": 2},
     {"zero_stage": 2, "zero_optimization.reduce_bucket_size": 1000}],
)  # fmt: skip
def test_where_and_when_it_is_computed_changes_no_numerics(values: dict) -> None:
    off = {"fp16": {"enabled": False, "loss_scale": 8}, "prescale_gradients": False, "communication_data_type": None}
    assert numerics(config(**values)) == numerics(off) == {}


@pytest.mark.parametrize(
    "values",
    [{"precision": "bf16"}, {"precision": "torch_autocast"}, {"communication_data_type": "bf16"},
     {"zero_stage": 3, "zero_optimization.zero_quantized_weights": True}],
)  # fmt: skip
def test_precision_wire_quantisation_and_compression_do(values: dict) -> None:
    assert numerics(config(**values)) != {}


ADAM = {"optimizer.params.lr": 0.1, "gradient_clipping": 1}


@pytest.mark.parametrize(
    ("change", "same"),
    [({"gradient_clipping": 0}, False), ({"gradient_clipping": None}, False), ({"gradient_clipping": 1.0}, True),
     ({"optimizer.params.weight_decay": 0.1}, False),
     ({"optimizer.params.torch_adam": True, "optimizer.params.fused": True}, True),
     ({"scheduler.params.warmup_num_steps": 9}, False), ({"gradient_allreduce_op": "sum"}, False)],
)  # fmt: skip
def test_so_does_what_weights_make_of_a_gradient_but_not_the_kernel_that_computes_it(change: dict, same: bool) -> None:
    """A candidate without the baseline's clipping was called drop-in, training unchanged but for its speed."""
    assert keeps_numerics(config(**ADAM | change), config(**ADAM)) is same


def test_so_does_accumulating_in_16_bits() -> None:
    once, often = config(precision="bf16"), config(precision="bf16", gradient_accumulation_steps=8)
    exact = {"data_types.grad_accum_dtype": "fp32", "precision": "bf16", "zero_stage": 2}
    assert numerics(once) == {"bf16": {"enabled": True}}
    assert numerics(often) == {"bf16": {"enabled": True}, "accumulated in 16 bits": 8}
    assert numerics(config(**exact)) == numerics(config(**exact, gradient_accumulation_steps=8))


def test_a_sum_of_fewer_gradients_keeps_the_numerics_and_of_more_is_judged_by_its_own_error() -> None:
    few, many, fp32 = (
        config(precision=p, gradient_accumulation_steps=k) for p, k in (("bf16", 2), ("bf16", 8), ("fp32", 8))
    )
    assert keeps_numerics(few, many) and keeps_numerics(few, few) and not keeps_numerics(many, few)
    assert not keeps_numerics(few, fp32) and not differs_in_sums_alone(few, fp32) and differs_in_sums_alone(many, few)
    passed = judge_sum(GradientCheck(error=0.002, norm=1.0, n_micro=8), 64)
    assert passed is not None and passed.passed and passed.gradient_error == 0.002 and passed.batch == 64
    off = GradientCheck(error=0.02, norm=1.0, n_micro=8)
    # Its loss curve decides then, and the error stands in the way all the same.
    assert (
        judge_sum(off, 64) is None
        and judge_sum(None, 64) is None
        and "accumulate in fp32" in judge_gradient(off, None, many)
    )


def test_a_lag_of_a_step_is_none_where_the_luck_of_the_batches_hides_how_steep_the_curve_is() -> None:
    """Twelve steps of batches of 8, as measured: bf16 at stage 0, whose first step is shortened, beside fp32."""
    base = np.array([1.4843, 1.4419, 1.3588, 1.4194, 1.5248, 1.4204, 1.4116, 1.5804, 1.4405, 1.4597, 1.4681, 1.3504])
    behind = base + 1e-4 * np.array([1.3, 1.6, 6.9, 21.0, 11.5, 29.5, 21.6, 18.5, 8.6, 20.9, 23.5, 4.0])
    others = [
        base + 1e-4 * np.array([0, -1, 0, 1, 1, 0, 0, 1, 0, 0, -1, 0]),
        base - 1e-4 * np.array([0, 2, -1, 1, 2, 0, -1, 2, 1, -1, -1, -1]),
    ]
    assert judge(behind, base, others).passed
    assert judge(base + 0.02, base, others).passed is False


def test_a_script_that_draws_weights_or_samples_anew_in_each_run_is_told_so() -> None:
    """Met as "its loss is 1.1 above theirs, and up to 6.6 above is chance", with losses of 6."""
    assert "losses of 8.38, 5.86, 5.94" in starts_anew([[8.378, 5.2, 2.9], [5.855, 4.7, 3.6], [5.943, 5.6, 3.5]])
    assert not starts_anew([[4.066, 95.1, 38.2], [4.069, 95.0, 38.1], [4.058, 95.2, 38.2]])
    assert not starts_anew([[], [None, 1.0]])


@pytest.mark.parametrize("at", [0, 20])
def test_a_reference_that_is_no_number_passes_nothing(at):
    """Each comparison with NaN is false, so that any candidate passed."""
    reference = [3.0 - 0.05 * n for n in range(40)]
    broken = [*reference[:at], None, *reference[at + 1 :]]
    for base, other in ((broken, reference), (reference, broken)):
        found = judge([9.0] * 40, base, [other])
        assert found.passed is None and "not finite" in found.reason and not found.losses
