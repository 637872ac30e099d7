"""What a machine was probed for: rates by precision, and what collectives take by the size of their message."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import nnls

from autotune.predictors.profile import Machine

# Messages that follow each other, in units of N - 1, and passes over the data, in units of (N - 1) / N, of each ring.
RINGS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
# What no link falls below and none exceeds, so that a fit can be divided by.
LEAST_ALPHA_S, MOST_BYTES_PER_S = 1e-7, 1e13


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a collective takes: t = k (N - 1) alpha + k (N - 1) / N bytes / beta, k of `RINGS`.

    Attributes:
        collective: Its name.
        world_size: Ranks N.
        alpha_s: Latency of one message.
        bytes_per_s: Beta, what is called the bus bandwidth elsewhere.
        error: Median relative error of the fit.
        times_s: What was measured: bytes of the whole message, shortest time of the slowest rank.
    """

    collective: str
    world_size: int
    alpha_s: float
    bytes_per_s: float
    error: float
    times_s: tuple[tuple[int, float], ...] = ()

    def seconds(self, n_bytes: float) -> float:
        """What a message of that size takes."""
        k, n = RINGS[self.collective], float(self.world_size)
        return k * (n - 1) * self.alpha_s + k * (n - 1) / n * n_bytes / self.bytes_per_s


def fit(collective: str, world_size: int, times_s: Sequence[tuple[int, float]]) -> Link:
    """Latency and bandwidth by least squares of the relative error, neither of them negative.

    Of the absolute error the largest message would decide alone.
    """
    k, n = RINGS[collective], float(world_size)
    rows = np.array([[k * (n - 1) / seconds, k * (n - 1) / n * size / seconds] for size, seconds in times_s])
    # Columns of one size: seconds per message and per byte lie nine orders of magnitude apart.
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    found = nnls(rows / scale, np.ones(len(rows)))[0] / scale
    link = Link(
        collective=collective,
        world_size=world_size,
        alpha_s=max(float(found[0]), LEAST_ALPHA_S),
        bytes_per_s=1.0 / max(float(found[1]), 1.0 / MOST_BYTES_PER_S),
        error=0.0,
        times_s=tuple(times_s),
    )
    error = statistics.median(abs(link.seconds(size) / seconds - 1) for size, seconds in times_s)
    return Link(**{**vars(link), "error": error})


@dataclass(frozen=True, kw_only=True)
class LoaderRate:
    """How fast torch's `DataLoader` hands out batches.

    Attributes:
        n_workers: Its `num_workers`; 0 loads in the rank itself.
        samples_per_s: For each rank, while all of them load.
        bytes_per_s: The same in bytes; 0 for the user's own data.
    """

    n_workers: int
    samples_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a rank reaches on a machine while all ranks do the same.

    Attributes:
        machine: The rates that forecasts go by.
        device_name: Model of the device.
        threads: Threads of a rank on a CPU; 0 elsewhere.
        flops: FLOP/s of matrix products by the type of their numbers, at the size that does best.
        sizes: That size.
        links: The collectives; none for one rank.
        loader: Batches of synthetic samples.
        data: Batches of the user's own data, where a target was named.
        caveats: What could not be measured.
    """

    machine: Machine
    device_name: str
    threads: int
    flops: Mapping[str, float] = field(hash=False)
    sizes: Mapping[str, int] = field(hash=False)
    links: tuple[Link, ...] = ()
    loader: tuple[LoaderRate, ...] = ()
    data: LoaderRate | None = None
    caveats: tuple[str, ...] = ()
