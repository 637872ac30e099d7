"""Whether a loss depends on the micro-batch, by the first losses of two trials on the same samples."""

import numpy as np
import pytest

from autotune.scoring.convergence.branch import Run
from autotune.scoring.convergence.first_losses import first_losses_off, off_at_another_batch

CURVE = [3.35, 3.30, 3.21, 3.16, 3.09, 3.01, 2.98, 2.9, 2.7]


def test_a_contrastive_loss_over_twice_the_samples_is_another_loss():
    assert first_losses_off([loss + np.log(2) for loss in CURVE], CURVE) == pytest.approx(0.22, abs=0.01)
    assert first_losses_off([loss - np.log(2) for loss in CURVE], CURVE) == pytest.approx(-0.22, abs=0.01)


@pytest.mark.parametrize("same_numerics", [True, False])
def test_a_contrastive_loss_that_falls_to_nothing_in_these_steps_is_another_loss(same_numerics):
    """Two towers over 32 and 128 samples: the difference of log 4 falls with the losses."""
    few, many = [4.80, 2.46, 1.05, 0.53, 0.31], [6.27, 3.75, 2.06, 1.25, 0.80, 0.59, 0.40, 0.34]
    assert first_losses_off(many, few, same_numerics=same_numerics) == pytest.approx(0.31, abs=0.01)
    assert first_losses_off(few, many, same_numerics=same_numerics) == pytest.approx(-0.24, abs=0.01)
    assert first_losses_off([4.80, 2.46, 1.4, 1.2, 1.2], few, same_numerics=same_numerics) == 0


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("noise", [0.001, 0.02, 0.2])
def test_dropout_and_random_timesteps_are_chance(seed, noise):
    own, other = np.array(CURVE) * (1 + noise * np.random.default_rng(seed).normal(size=(2, len(CURVE))))
    assert first_losses_off(list(own), list(other)) == 0


def test_a_sure_but_small_difference_is_of_no_account_and_a_curve_of_two_steps_tells_nothing():
    assert first_losses_off([0.97 * loss for loss in CURVE], CURVE) == 0
    assert first_losses_off([2 * loss for loss in CURVE[:2]], CURVE) == 0
    assert first_losses_off([], []) == 0
    assert first_losses_off([None, *CURVE[1:]], CURVE) == 0


def test_between_numerics_only_another_loss_from_the_first_step_on_counts():
    """What rounding does shows later, and only where training goes astray."""
    other = [loss + np.log(2) for loss in CURVE]
    assert first_losses_off(other, CURVE, same_numerics=False) == pytest.approx(0.22, abs=0.01)
    assert first_losses_off([1.1 * loss for loss in CURVE], CURVE, same_numerics=False) == 0
    assert first_losses_off([CURVE[0], *other[1:]], CURVE, same_numerics=False) == 0


def curve(batch, *, higher=0.0, fall=3.0, samples=400, seed=0):
    """A training on one order of samples, some harder than others, whose loss has a third of its fall left after a number of samples."""
    harder = np.random.default_rng(seed).normal(scale=0.15, size=4096).reshape(-1, batch).mean(1)
    at = np.arange(len(harder)) * batch
    return Run(losses=list(3.0 + higher + harder + fall * np.exp(-at / samples)), batch=batch, samples_per_s=1.0)


@pytest.mark.parametrize("batch", [4, 16, 128])
def test_a_contrastive_loss_is_another_one_at_another_global_batch_too(batch):
    for higher in (np.log(2), -np.log(2)):
        off = off_at_another_batch(curve(batch, higher=higher, fall=1.0), curve(8, fall=1.0))
        assert np.sign(off) == np.sign(higher) and 0.1 < abs(off) < 0.3


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("samples", [20, 200, 2000])
def test_a_loss_that_falls_far_within_a_large_step_is_no_other_one(samples, seed):
    for one, other in ((8, 16), (8, 128), (128, 8)):
        assert (
            off_at_another_batch(curve(one, samples=samples, seed=seed), curve(other, samples=samples, seed=seed)) == 0
        )


def test_few_steps_or_a_loss_that_is_no_number_tell_nothing_of_another_global_batch():
    whole, broken = curve(8, higher=3.0), Run(losses=[None] * 64, batch=8, samples_per_s=1.0)
    assert off_at_another_batch(Run(losses=whole.losses[:3], batch=8, samples_per_s=1.0), curve(4)) == 0
    assert off_at_another_batch(whole, Run(losses=curve(256).losses[:3], batch=256, samples_per_s=1.0)) == 0
    assert off_at_another_batch(broken, curve(16)) == 0
