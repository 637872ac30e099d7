"""The noise scale, what a batch is worth by it, and the rules for the learning rate."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.scoring.convergence.learning_rate import LearningRate, default_rule
from autotune.scoring.convergence.noise_scale import NoiseScale, efficiency, falling, noise_scale, noise_scale_of
from autotune.trial.result import NoiseTerms

POSITIVE = st.floats(0.01, 1e5)


def drawn_steps(phi: float, *, b: int, M: int, steps: int, seed: int, dim: int = 200):
    """q and t of each step, for a gradient of size 1 and isotropic noise with trace phi."""
    rng = np.random.default_rng(seed)
    truth = np.ones(dim) / math.sqrt(dim)
    q, t = [], []
    for _ in range(steps):
        g = truth + rng.standard_normal((M, dim)) * math.sqrt(phi / dim / b)
        q.append((g**2).sum(axis=1).mean())
        t.append((g.mean(axis=0) ** 2).sum())
    return q, t


def test_the_noise_scale_is_that_of_the_distribution_drawn_from() -> None:
    q, t = drawn_steps(100, b=8, M=8, steps=60, seed=0)
    found = noise_scale(q, t, micro_batch_size=8, n_micro=8)
    assert found.samples == pytest.approx(100, rel=0.1)
    assert found.resolved
    assert found.low < found.samples < found.high


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    held = 0
    for seed in range(200):
        q, t = drawn_steps(50, b=4, M=8, steps=30, seed=seed, dim=60)
        found = noise_scale(q, t, micro_batch_size=4, n_micro=8)
        held += found.low <= 50 <= found.high
    assert held >= 175  # a percentile bootstrap of 30 steps covers somewhat less than 95 %


def test_too_few_samples_for_the_noise_give_a_lower_bound_only() -> None:
    q, t = drawn_steps(20_000, b=1, M=4, steps=12, seed=1)
    found = noise_scale(q, t, micro_batch_size=1, n_micro=4)
    assert not found.resolved
    assert str(found).startswith("gradient noise scale: more than ")
    assert found.low < 20_000


def test_large_noise_scales_are_written_out() -> None:
    """They read as 1.23e+04 samples."""
    found = NoiseScale(samples=12_345.0, low=8_000.0, high=23_456.0, resolved=True)
    assert str(found) == "gradient noise scale: 12,345 samples (8,000 to 23,456)"
    assert "more than 8,000 samples" in str(replace(found, resolved=False))


def test_a_gradient_that_is_lost_in_the_noise_is_said_to_be_without_a_number() -> None:
    """With random labels: "more than 1e+15 samples"."""
    found = noise_scale([2.0] * 20, [0.1] * 20, micro_batch_size=4, n_micro=4)
    assert not found.resolved and "samples" not in str(found) and "no gradient shows in the noise" in str(found)


def test_one_micro_batch_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two micro-batches"):
        noise_scale([1.0] * 9, [1.0] * 9, micro_batch_size=4, n_micro=1)


def test_gradients_that_are_not_finite_resolve_nothing() -> None:
    assert not noise_scale([1.0] * 8 + [math.inf], [0.5] * 9, micro_batch_size=4, n_micro=2).resolved


@given(POSITIVE, POSITIVE, POSITIVE)
def test_the_baseline_has_efficiency_one_and_larger_batches_less(phi: float, batch: float, base: float) -> None:
    assert efficiency(phi, base, base) == pytest.approx(1)
    assert (efficiency(phi, batch, base) <= 1) == (batch >= base)


@given(POSITIVE, POSITIVE, POSITIVE)
def test_time_to_target_by_goodput_is_steps_times_step_time(phi: float, batch: float, base: float) -> None:
    steps = lambda b: 1 + phi / b  # noqa: E731  # in units of S_min
    by_steps = steps(batch) * batch / (steps(base) * base)  # samples to the target, relative to the baseline
    assert 1 / efficiency(phi, batch, base) == pytest.approx(by_steps)


@pytest.mark.parametrize(("rule", "factor"), [("none", 1), ("linear", 4), ("sqrt", 2)])
def test_the_rules_are_those_of_their_papers(rule: str, factor: float) -> None:
    rate = LearningRate(rule=rule, baseline_batch=16)
    assert rate.factor(16) == 1 and rate.factor(64) == factor


def test_sgd_follows_the_batch_linearly_and_others_by_its_root() -> None:
    assert default_rule("SGD") == "linear" and default_rule("AdamW") == default_rule("") == "sqrt"


def test_every_learning_rate_of_a_configuration_follows_the_batch() -> None:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": 10},
        },
    }
    of_groups = {
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": [0.0, 1e-4], "cycle_max_lr": [1e-3, 3e-3]}}
    }
    rate = LearningRate(rule="sqrt", baseline_batch=8)
    assert rate.scaled(config, 8) == config
    scaled = rate.scaled(config, 32)
    assert scaled["optimizer"]["params"] == {"lr": 2e-3, "betas": [0.9, 0.95]}
    assert scaled["scheduler"] == config["scheduler"]  # "auto" is filled in from the optimizer's, and 0 stays
    assert config["optimizer"]["params"]["lr"] == 1e-3
    assert rate.scaled({}, 32) == {}
    params = rate.scaled(of_groups, 32)["scheduler"]["params"]  # lists stayed as they were
    assert params == {"cycle_min_lr": [0.0, 2e-4], "cycle_max_lr": [2e-3, 6e-3]}


def test_a_noise_scale_that_still_grows_is_said_to_and_one_that_stands_is_not() -> None:
    steady = NoiseTerms(
        micro_batch_size=4, n_micro=4, micro_sq=[4 + 0.1 * (i % 3) for i in range(30)], mean_sq=[2.0] * 30
    )
    grown = NoiseTerms(micro_batch_size=4, n_micro=4, micro_sq=[4 + 0.1 * i for i in range(30)], mean_sq=[2.5] * 30)
    assert not noise_scale_of(steady).growing
    assert noise_scale_of(grown).growing and "still growing" in str(noise_scale_of(grown))


def test_a_loss_that_falls_is_told_from_one_that_stands_or_only_wavers() -> None:
    wavers = [2.0 + 0.2 * (-1) ** (i // 2) for i in range(60)]
    assert not falling(wavers)
    assert falling([2.0 * 0.99**i for i in range(60)])
    assert falling([loss * 0.99**i for i, loss in enumerate(wavers)])
    # A thousandth of a fall is none, and a fall within the first third is over.
    assert not falling([2.0 * 0.99999**i for i in range(60)])
    assert not falling([5.0] * 15 + wavers)
    assert falling(wavers[:20])  # too few to tell
