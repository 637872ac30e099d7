"""Whether a loss depends on the micro-batch, by the first losses of two trials on the same samples."""

import numpy as np
import pytest

from autotune.scoring.convergence.first_losses import first_losses_off

CURVE = [3.35, 3.30, 3.21, 3.16, 3.09, 3.01, 2.98, 2.9, 2.7]


def test_a_contrastive_loss_over_twice_the_samples_is_another_loss():
    assert first_losses_off([loss + np.log(2) for loss in CURVE], CURVE) == pytest.approx(0.22, abs=0.01)
    assert first_losses_off([loss - np.log(2) for loss in CURVE], CURVE) == pytest.approx(-0.22, abs=0.01)


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
