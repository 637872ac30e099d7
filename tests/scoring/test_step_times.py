"""Step-time statistics on series whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.scoring import step_times

SETUP = [3.0, 2.0]  # the steps that are never timed
TIMES = st.lists(st.floats(1e-6, 1e4), max_size=60)


def noise(seed: int, n: int, sd: float, correlation: float = 0.0) -> np.ndarray:
    """Step times with median 1 s: log-normal, neighbours correlated (AR(1))."""
    random = np.random.default_rng(seed).standard_normal(n)
    for i in range(1, n):
        random[i] = correlation * random[i - 1] + math.sqrt(1 - correlation**2) * random[i]
    return np.exp(sd * random)


class TestWarmup:
    """Where the change-point lies."""

    @pytest.mark.parametrize("n_slow", [1, 3, 10])
    @pytest.mark.parametrize("seed", range(5))
    def test_a_plateau_of_slow_steps_is_cut_where_it_ends(self, n_slow: int, seed: int) -> None:
        times = noise(seed, 30, 0.02)
        times[:n_slow] *= 1.5
        assert step_times.warmup_steps([*SETUP, *times]) == 2 + n_slow

    @pytest.mark.parametrize("seed", range(5))
    def test_a_ramp_is_cut_until_little_of_it_is_left(self, seed: int) -> None:
        times = noise(seed, 40, 0.01)
        times[:12] *= np.linspace(3, 1, 12)
        cut = step_times.warmup_steps([*SETUP, *times]) - 2
        assert 4 <= cut <= 12
        assert step_times.summarise([*SETUP, *times]).median_s == pytest.approx(1.0, rel=0.03)

    def test_a_speed_up_in_reverse_is_a_change_too(self) -> None:
        times = noise(0, 30, 0.02)
        times[:5] *= 0.5  # the machine slowed down: what comes after is what lasts
        assert step_times.warmup_steps([*SETUP, *times]) == 7

    def test_of_a_long_series_the_warm_up_is_cut_within_a_few_steps(self) -> None:
        times = noise(0, 3000, 0.02)
        times[:1000] *= 1.5
        assert step_times.warmup_steps([*SETUP, *times]) == pytest.approx(1002, abs=6)

    def test_without_a_change_nothing_but_the_set_up_is_cut(self) -> None:
        assert step_times.warmup_steps([*SETUP, *[1.0] * 20]) == 2
        assert step_times.warmup_steps([*SETUP, *np.linspace(1.0, 1.01, 20)]) == 2

    @pytest.mark.parametrize(
        ("n", "at_most"), [(20, 0.15), (50, 0.05), pytest.param(200, 0.03, marks=pytest.mark.system)]
    )
    def test_noise_is_seldom_taken_for_warm_up(self, n: int, at_most: float) -> None:
        cuts = [step_times.warmup_steps([*SETUP, *noise(seed, n, 0.1)]) > 2 for seed in range(300)]
        assert np.mean(cuts) <= at_most

    def test_an_outlier_is_no_change(self) -> None:
        times = noise(1, 30, 0.01)
        times[7] = 20.0
        assert step_times.warmup_steps([*SETUP, *times]) == 2

    @given(TIMES)
    def test_at_most_half_of_the_timed_steps_is_cut(self, times: list[float]) -> None:
        cut = step_times.warmup_steps(times)
        assert min(2, len(times)) <= cut <= max(2, 2 + (len(times) - 2) // 2)
        assert cut <= len(times)


class TestInterval:
    """How often the interval holds the true median, in simulation: 95 % where it can be known, less where steps are few or alike."""

    @pytest.mark.cells(5)
    @pytest.mark.parametrize(
        ("n", "correlation", "at_least"),
        [
            (8, 0.0, 0.93), (12, 0.0, 0.90), (30, 0.0, 0.93), (100, 0.0, 0.93),
            (30, 0.5, 0.85), (100, 0.5, 0.92), pytest.param(300, 0.5, 0.93, marks=pytest.mark.system),
            (100, 0.8, 0.85), pytest.param(300, 0.8, 0.90, marks=pytest.mark.system),
        ],
    )  # fmt: skip
    def test_it_covers_the_true_median(self, n: int, correlation: float, at_least: float) -> None:
        covered = []
        for seed in range(150):
            summary = step_times.summarise([*SETUP, *noise(seed, n, 0.05, correlation)])
            covered.append(abs(summary.median_s - 1.0) <= summary.ci95_s)
        assert np.mean(covered) >= at_least

    @pytest.mark.parametrize("n", [3, 4, 5])
    def test_of_few_steps_it_is_two_standard_errors(self, n: int) -> None:
        few = [step_times.summarise([*SETUP, *noise(seed, n, 0.01)]) for seed in range(600)]
        errors = np.array([summary.median_s - 1.0 for summary in few])
        assert np.mean([summary.ci95_s for summary in few]) == pytest.approx(1.96 * errors.std(), rel=0.15)

    @pytest.mark.system
    def test_it_is_no_wider_than_it_must_be(self) -> None:
        """The median of n normal steps scatters by 1.253 sd / sqrt(n)."""
        widths = [step_times.summarise([*SETUP, *noise(seed, 100, 0.05)]).ci95_s for seed in range(200)]
        assert np.median(widths) == pytest.approx(1.96 * 1.253 * 0.05 / 10, rel=0.3)

    def test_correlated_steps_say_less_than_independent_ones(self) -> None:
        alone, alike = (
            np.median([step_times.summarise([*SETUP, *noise(s, 60, 0.05, r)]).ci95_s for s in range(100)])
            for r in (0.0, 0.7)
        )
        assert alike > 1.5 * alone

    @pytest.mark.system
    def test_stopping_as_soon_as_it_is_narrow_keeps_most_of_its_cover(self) -> None:
        covered = []
        for seed in range(40):
            times = noise(seed, 2000, 0.05)
            n = next(n for n in range(7, 2000) if step_times.measured_enough([*SETUP, *times[: n - 2]]))
            summary = step_times.summarise([*SETUP, *times[: n - 2]])
            covered.append(abs(summary.median_s - 1.0) <= summary.ci95_s)
        assert np.mean(covered) >= 0.85

    def test_a_window_is_one_reading_however_many_steps_it_holds(self) -> None:
        windows = noise(0, 12, 0.05)
        each, in_windows = (
            step_times.summarise([*SETUP, *windows]),
            step_times.summarise([*SETUP, *np.repeat(windows, 25)]),
        )
        assert in_windows.ci95_s == each.ci95_s
        assert (in_windows.median_s, in_windows.n_steps) == (each.median_s, 25 * each.n_steps)


class TestSummary:
    """Median and counts."""

    def test_the_median_is_of_the_steps_after_warm_up(self) -> None:
        summary = step_times.summarise([*SETUP, 1.0, 2.0, 3.0])
        assert (summary.median_s, summary.n_steps, summary.n_warmup) == (2.0, 3, 2)
        assert summary.relative_ci == summary.ci95_s / 2.0

    @pytest.mark.parametrize("n", [0, 1, 2])
    def test_without_timed_steps_nothing_is_known(self, n: int) -> None:
        summary = step_times.summarise([1.0] * n)
        assert summary.n_steps == 0 and math.isnan(summary.median_s) and math.isinf(summary.relative_ci)

    @pytest.mark.parametrize("n", [1, 2])
    def test_two_steps_say_nothing_of_their_spread(self, n: int) -> None:
        """Their interval began at 0, of which no logarithm is taken, so that the study took them to be exact."""
        few = step_times.summarise([*SETUP, *[1.0] * n])
        assert 0.2 < few.relative_ci < 1.0

    @given(TIMES)
    def test_any_series_can_be_summarised(self, times: list[float]) -> None:
        summary = step_times.summarise(times)
        assert summary.n_steps + summary.n_warmup == len(times)
        assert summary.n_steps == 0 or min(times) <= summary.median_s <= max(times)
        assert summary.ci95_s >= 0


class TestEnough:
    """When a trial may stop."""

    def test_five_equal_readings_are_enough_and_four_are_not(self) -> None:
        times = [1.0, 1.001, 0.999, 1.0005, 0.9995]
        assert step_times.measured_enough([*SETUP, *times])
        assert not step_times.measured_enough([*SETUP, *times[:4]])

    def test_one_long_window_is_one_reading(self) -> None:
        assert not step_times.measured_enough([*SETUP, *[1.0] * 100])

    def test_five_scattered_steps_are_not(self) -> None:
        assert not step_times.measured_enough([*SETUP, 1.0, 1.2, 0.9, 1.1, 1.0])

    def test_what_is_cut_does_not_count(self) -> None:
        assert not step_times.measured_enough([*SETUP, 2.0, 2.01, 1.99, 1.0, 1.001, 0.999, 1.0])
        assert step_times.measured_enough([*SETUP, 2.0, 2.01, 1.99, 1.0, 1.001, 0.999, 1.0005, 0.9995])

    @given(TIMES)
    def test_every_rank_decides_alike(self, times: list[float]) -> None:
        assert (
            step_times.measured_enough(times)
            == step_times.measured_enough(tuple(times))
            == step_times.measured_enough(np.array(times).tolist())
        )


class TestRatio:
    """Speed-ups of paired measurements."""

    def test_it_is_the_geometric_mean(self) -> None:
        ratio, (low, high) = step_times.ratio_ci95([math.log(2), math.log(8)])
        assert ratio == pytest.approx(4.0)
        assert low < 4.0 < high

    def test_the_interval_covers_in_95_of_100(self) -> None:
        random = np.random.default_rng(0)
        covered = []
        for _ in range(1000):
            _, (low, high) = step_times.ratio_ci95(list(0.2 + 0.1 * random.standard_normal(4)))
            covered.append(low <= math.exp(0.2) <= high)
        assert 0.93 <= np.mean(covered) <= 0.97

    def test_one_pair_says_nothing(self) -> None:
        _, (low, high) = step_times.ratio_ci95([0.0])
        assert low == 0.0 and high > 1e20


def test_a_short_trial_keeps_three_timed_steps_whatever_its_first_ones_were():
    """Of four steps two were cut, and two say nothing: the recommended trial had no speed-up to state."""
    found = step_times.summarise([0.34, 0.24, 0.2131, 0.2038, 0.1829, 0.1911])
    assert found.n_steps >= step_times.LEAST_TIMED_STEPS
