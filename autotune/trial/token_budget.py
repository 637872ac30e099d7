"""Token budgets: batches of as many samples as a number of tokens holds, padding included."""

import bisect
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

import numpy as np

from autotune.trial.lengths import Table, cut, expected

Sample = TypeVar("Sample")

# Batches' worth of samples that wait, so that those of similar length are found among them.
POOL_BATCHES = 32
# Batches and samples that a simulation draws at most, and its rounds until the mean batch is the wanted one.
MOST_BATCHES, MOST_SAMPLES, ROUNDS = 300, 20_000, 8
# Share by which the mean batch may differ.
CLOSE = 0.01


class Filled(NamedTuple):
    """A batch that a token budget fills, on average; tokens include padding."""

    samples: float
    tokens: float


def fill(source: Iterable[tuple[int, Sample]], tokens: int, pool: int) -> Iterator[list[Sample]]:
    """Yields batches of at most `tokens` tokens: a waiting sample, with those nearest to it in length.

    The sample is drawn in proportion to its length, as short ones come many at once: so what waits keeps the lengths of the
    source, and the first batches are like later ones. One that is longer than the budget makes a batch by itself.

    Args:
        source: Samples with the lengths that they are padded to by themselves.
        tokens: Rows times the longest of them.
        pool: Samples that wait.
    """
    numbered = ((length, number, sample) for number, (length, sample) in enumerate(source))
    waiting = sorted(itertools.islice(numbered, pool), key=_order)
    rng = random.Random(0)
    while waiting:
        at = rng.randrange(len(waiting))
        while rng.random() * waiting[-1][0] > waiting[at][0]:
            at = rng.randrange(len(waiting))
        first, end = _around(waiting, at, tokens)
        chosen = waiting[first:end]
        del waiting[first:end]
        for each in itertools.islice(numbered, len(chosen)):
            bisect.insort(waiting, each, key=_order)
        yield [sample for _, _, sample in chosen]


def _order(each: tuple[int, int, Sample]) -> tuple[int, int]:
    return each[:2]


def _around(waiting: list[tuple[int, int, Sample]], at: int, tokens: int) -> tuple[int, int]:
    """Returns the range of the samples around one that fit beside it, nearest lengths first."""
    first, end = at, at + 1
    while True:
        n, length = end - first + 1, waiting[at][0]
        shorter = length - waiting[first - 1][0] if first and n * waiting[end - 1][0] <= tokens else None
        longer = waiting[end][0] - length if end < len(waiting) and n * waiting[end][0] <= tokens else None
        if longer is not None and (shorter is None or longer <= shorter):
            end += 1
        elif shorter is not None:
            first -= 1
        else:
            return first, end


def padded(known: Table, changes: Mapping[str, object]) -> Table:
    """Returns the lengths that samples are padded to by themselves, under settings of the data by name."""
    known = cut(known, float(str(changes["max_length"]))) if "max_length" in changes else known
    multiple = int(str(changes.get("pad_to_multiple_of", 1)))
    return tuple((float(math.ceil(length / multiple) * multiple), n) for length, n in known)


def filled(known: Table, tokens: int, micro: int) -> Filled:
    """Returns the mean batch of a budget, from samples that are drawn at random.

    Args:
        micro: Samples that a batch is to hold on average.
    """
    values, counts = np.array(known, dtype=float).T
    rng, n = np.random.default_rng(0), max(20, min(MOST_BATCHES, MOST_SAMPLES // micro))
    drawn = map(int, np.ceil(rng.choice(values, (n + POOL_BATCHES) * 2 * micro, p=counts / counts.sum())))
    found = list(itertools.islice(fill(((each, each) for each in drawn), tokens, POOL_BATCHES * micro), n))
    real = sum(map(sum, found)) / len(found)
    # In the long run samples have the mean length, which those of a simulation miss by chance.
    return Filled(real / expected(known), sum(len(each) * max(each) for each in found) / len(found))


def tokens_for(known: Table, micro: int) -> int:
    """Returns the budget whose batches hold `micro` samples on average."""
    wanted = micro * expected(known)
    tried: list[tuple[float, int]] = []
    for _ in range(ROUNDS):
        tokens = max(1, round(wanted))
        samples = filled(known, tokens, micro).samples
        tried.append((abs(samples / micro - 1), tokens))
        if tried[-1][0] < CLOSE:
            break
        wanted *= micro / samples
    return min(tried)[1]
