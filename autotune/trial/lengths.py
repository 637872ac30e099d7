"""Lengths of samples: their histogram and table, and what padding to the longest of a batch makes of them."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

# Lengths with the number of samples that have them, ascending.
Table = tuple[tuple[float, int], ...]
# Classes of lengths that are kept of a data set.
MOST_CLASSES = 256
# Groups of samples that are drawn where a mean has no closed form, and samples of all of them at most.
N_SIMULATED, MOST_DRAWN = 2000, 2_000_000


def edge(length: float) -> int:
    """Returns the upper edge of the class that a length falls into; there are two classes per doubling."""
    return math.ceil(2 ** (math.ceil(2 * math.log2(length)) / 2) - 1e-9) if length > 1 else 1


def shares(known: Table) -> dict[int, float]:
    """Returns the share of the samples in each class of lengths, by upper edge, ascending."""
    counts: Counter[int] = Counter()
    for length, n in known:
        counts[edge(length)] += n
    return {top: n / counts.total() for top, n in counts.items()}


def table(lengths: Sequence[int]) -> Table:
    """Returns lengths with their counts, ascending: exact for few distinct ones, else means of classes and the longest."""
    values, counts = np.unique(np.asarray(lengths, dtype=np.int64), return_counts=True)
    if len(values) <= MOST_CLASSES:
        return tuple(zip(map(float, values), map(int, counts), strict=True))
    # The longest is a separate class, since it decides what fits.
    edges = np.geomspace(max(1, values[0]), values[-1], MOST_CLASSES)
    places = np.minimum(np.searchsorted(edges, values, side="right"), MOST_CLASSES - 1)
    places[-1] = MOST_CLASSES
    n = np.bincount(places, counts)
    total = np.bincount(places, counts * values)
    return tuple((float(total[i] / n[i]), int(n[i])) for i in np.flatnonzero(n))


def expected(known: Table, n: int = 1) -> float:
    """Returns the expected length of the longest of n samples that are drawn at random; their mean for n = 1."""
    if not known:
        return 0.0
    lengths, counts = np.array(known, dtype=float).T
    shares = np.concatenate([[0.0], np.cumsum(counts) / counts.sum()])
    return float(lengths @ np.diff(shares**n))


def mean_width(known: Table, micro: int, grouped: int = 1) -> float:
    """Returns the mean length that the samples of a micro-batch are padded to.

    Args:
        micro: Samples of a micro-batch.
        grouped: Micro-batches among which the samples are sorted by length.
    """
    if grouped == 1:
        return expected(known, micro)
    values, counts = np.array(known, dtype=float).T
    n = max(1, min(N_SIMULATED, MOST_DRAWN // (grouped * micro)))
    drawn = np.random.default_rng(0).choice(values, (n, grouped * micro), p=counts / counts.sum())
    return float(np.sort(drawn, axis=1)[:, micro - 1 :: micro].mean())


def cut(known: Table, length: float) -> Table:
    """Returns the lengths with those above a limit cut to it."""
    return tuple((min(each, float(length)), n) for each, n in known)


def longest(known: Table) -> int:
    """Returns the longest length; 0 if none is known."""
    return int(known[-1][0]) if known else 0
