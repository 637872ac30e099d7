"""Quantiles of the normal distribution and of Student's t, by which intervals are stated.

Importing scipy.special for them takes longer than all the rest of `autotune status`, and ranks stop by them.
"""

from statistics import NormalDist

# Standard deviations to either side of a normal's 90 % and 95 % interval.
Z90, Z95 = 1.645, 1.96
# Two-sided 95 % quantiles of Student's t with 1 to 9 degrees of freedom.
T95 = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157)


def t95(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t."""
    return T95[max(1, degrees) - 1] if degrees <= len(T95) else t_quantile(0.975, degrees)


def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t, for 8 degrees of freedom or more.

    By the expansion in 1 / degrees about the normal one (Abramowitz and Stegun 26.7.5), to 0.2 % up to a probability of
    0.9999.
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / float(degrees**power) for power, term in enumerate(terms, start=1))
