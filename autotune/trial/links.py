"""Records of a probed machine: rates by precision, and the time of collectives by message size."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autotune.trial.profile import Machine

# Factor k of each ring collective: k (N - 1) consecutive messages, and k (N - 1) / N times the data per rank.
RINGS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
# Bounds of every link, so that a fit is never zero.
LEAST_ALPHA_S, MOST_BYTES_PER_S = 1e-7, 1e13


@dataclass(frozen=True, kw_only=True)
class Link:
    """Time of a collective: t = k (N - 1) alpha + k (N - 1) / N bytes / beta, with k from `RINGS`.

    Attributes:
        world_size: Ranks N.
        alpha_s: Latency of one message.
        bytes_per_s: Beta, also called the bus bandwidth.
        error: Median relative error of the fit.
        times_s: Measurements: bytes of the whole message, shortest time of the slowest rank.
    """

    collective: str
    world_size: int
    alpha_s: float
    bytes_per_s: float
    error: float
    times_s: tuple[tuple[int, float], ...] = ()

    def seconds(self, n_bytes: float) -> float:
        """Returns the time for a message of this size."""
        k, n = RINGS[self.collective], float(self.world_size)
        return k * (n - 1) * self.alpha_s + k * (n - 1) / n * n_bytes / self.bytes_per_s


def fit(collective: str, world_size: int, times_s: Sequence[tuple[int, float]]) -> Link:
    """Fits latency and bandwidth, both non-negative, by least squares of the relative error.

    With the absolute error, the largest message would decide alone.
    """
    k, n = RINGS[collective], float(world_size)
    rows = np.array([[k * (n - 1) / seconds, k * (n - 1) / n * size / seconds] for size, seconds in times_s])
    # Scale the columns: seconds per message and seconds per byte differ by nine orders of magnitude.
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    rows /= scale
    found = np.linalg.lstsq(rows, np.ones(len(rows)))[0]
    # Where one would be negative, the other fits best alone. Scipy's `nnls` is not worth its import in every study's probe.
    if found.min() < 0:
        alone = rows.sum(axis=0) / (rows**2).sum(axis=0)
        found = np.where(np.arange(2) == ((rows * alone - 1) ** 2).sum(axis=0).argmin(), alone, 0.0)
    found /= scale
    link = Link(
        collective=collective,
        world_size=world_size,
        alpha_s=max(float(found[0]), LEAST_ALPHA_S),
        bytes_per_s=1.0 / max(float(found[1]), 1.0 / MOST_BYTES_PER_S),
        error=0.0,
        times_s=tuple(times_s),
    )
    error = statistics.median(abs(link.seconds(size) / seconds - 1) for size, seconds in times_s)
    return replace(link, error=error)


@dataclass(frozen=True, kw_only=True)
class LoaderRate:
    """Rate of torch's `DataLoader`.

    Attributes:
        n_workers: `num_workers`; 0 loads in the rank itself.
        samples_per_s: Samples per rank while all ranks load.
        bytes_per_s: Bytes per rank; 0 for the user's own data.
    """

    n_workers: int
    samples_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Rates that a rank reaches while all ranks of a machine do the same.

    Attributes:
        machine: Rates for forecasts.
        threads: Threads of a rank on a CPU; 0 on other devices.
        flops: FLOP/s of matrix products by number type, at the best size.
        sizes: The best sizes.
        links: Collectives; empty for one rank.
        loader: Rates for synthetic samples.
        data: Rate for the user's own data, if a target was named.
        caveats: Rates that could not be measured, and why.
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
