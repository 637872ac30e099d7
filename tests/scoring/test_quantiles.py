"""Quantiles without SciPy are those of SciPy."""

import pytest
from scipy import special

from autotune.scoring import quantiles


def test_quantiles_are_students() -> None:
    for degrees in (*range(40), 10**6):
        assert quantiles.t95(degrees) == pytest.approx(special.stdtrit(max(1, degrees), 0.975), rel=1e-5)


def test_quantiles_hold_far_out_where_many_are_compared() -> None:
    for degrees in (8, 12, 40, 10**6):
        for n_compared in (1, 15, 240):
            exact = special.stdtrit(degrees, 1 - 0.025 / n_compared)
            assert quantiles.t_quantile(1 - 0.025 / n_compared, degrees) == pytest.approx(exact, rel=2e-3)
