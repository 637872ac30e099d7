"""A search that knows the formulas of the simulated machines: what of the gap to the best is the forecast's, and what is left.

It knows the formulas of `simulator.py`, how its constants are distributed, how trials scatter, and the memory and the samples
of every candidate; not the constants. These are inferred from the trials (Gauss-Newton). The next trial follows from the
acquisitions that autotune uses, without turns for the goal or for untried levels: the hypervolume every second time, else the objective
that a trial is expected to improve most. No bound is proved by it: with other acquisitions the same knowledge may find more.
"""

from __future__ import annotations

import math

import numpy as np
from simulator import (
    LEVEL_SD,
    METRICS,
    MICRO_NOISE,
    MICRO_SHARE,
    RATE_SD,
    RATES,
    Columns,
    Noise,
    Table,
    measure,
    micro_steps,
)

from autotune.scoring import pareto
from autotune.search import acquisition

ROUNDS, LONGEST_MOVE, STEP = 4, 0.5, 1e-4
# Where some trials straggle, each reading is held to be this noisy at least.
STRAGGLER_SD = 0.04
NEAREST, WEIGHTINGS = 150, 6


class KnownMachine:
    """What is inferred of a machine's constants, and what follows for its candidates.

    Args:
        table: The machine.
        noise: How trials read.
    """

    def __init__(self, table: Table, noise: Noise) -> None:
        self.table = table
        self.columns = Columns.of(table.world.space, table.candidates)
        n_levels = len(self.columns.levels)
        self.sd = np.array([*[RATE_SD] * len(RATES), *[LEVEL_SD] * n_levels])
        self.constants, self.covariance = np.zeros(len(self.sd)), np.diag(self.sd**2)
        self.noise = noise.sd if not noise.stragglers else max(noise.sd, STRAGGLER_SD)
        self.micro_noise = max(MICRO_NOISE, MICRO_SHARE * noise.sd)
        # Of each reading: step (0), inner (1) or boundary micro-step (2); candidate; logarithm; standard deviation.
        self.readings: list[tuple[int, int, float, float]] = []

    def tell(self, row: int, step_s: float, micro_s: dict[str, float]) -> None:
        """Takes what a trial read, and infers the constants anew."""
        self.readings.append((0, row, math.log(step_s), self.noise))
        for which, name in enumerate(("inner", "boundary"), start=1):
            if name in micro_s:
                self.readings.append((which, row, math.log(micro_s[name]), self.micro_noise))
        which, rows, read, sd = (np.array(column) for column in zip(*self.readings, strict=True))
        for _ in range(ROUNDS):
            said, slopes = self._linear()
            at, slope = said[which, rows], slopes[which, rows] / sd[:, None]
            self.covariance = np.linalg.inv(slope.T @ slope + np.diag(1 / self.sd**2))
            found = self.covariance @ (slope.T @ ((read - at) / sd + slope @ self.constants))
            self.constants = self.constants + np.clip(found - self.constants, -LONGEST_MOVE, LONGEST_MOVE)

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Expected costs of all candidates, as `Table.costs`, and how the log step time depends on each constant."""
        said, slopes = self._linear()
        log_batch = np.log(self.table.batch)
        per_sample = said[0] - log_batch
        return np.column_stack([said[0], per_sample, per_sample + np.log(self.table.samples)]), slopes[0]

    def sd_apart(self, slopes: np.ndarray, rows: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Standard deviation of the difference of each row from each of some others."""
        apart = slopes[rows][:, None, :] - slopes[others][None, :, :]
        return np.asarray(np.sqrt(np.einsum("ijk,kl,ijl->ij", apart, self.covariance, apart) + 1e-8))

    def _linear(self) -> tuple[np.ndarray, np.ndarray]:
        """Logarithms of step, inner and boundary micro-step of all candidates, and their slopes by each constant."""

        def logs(constants: np.ndarray) -> np.ndarray:
            costs = self.table.world.costs(self.columns, constants)
            return np.log(np.stack([costs.seconds, costs.inner, costs.boundary]))

        at = logs(self.constants)
        of_rates = [(logs(self.constants + STEP * axis) - at) / STEP for axis in np.eye(len(self.sd))[: len(RATES)]]
        of_levels = np.broadcast_to(self.columns.present, (3, *self.columns.present.shape))
        return at, np.concatenate([np.stack(of_rates, axis=2), of_levels], axis=2)


def rows_of_known(table: Table, seed: int, n_trials: int, noise: Noise) -> list[int]:
    """The candidates that such a study tries, in order; all of them fit."""
    machine, rng = KnownMachine(table, noise), np.random.default_rng((seed, 11))
    tried = [table.row[table.world.default]]
    while True:
        row = tried[-1]
        machine.tell(row, measure(table, row, rng, noise)["step_time_s"], micro_steps(table, row, rng, noise))
        if len(tried) == n_trials:
            return tried
        tried.append(_next(machine, tried))


def _next(machine: KnownMachine, tried: list[int]) -> int:
    mean, slopes = machine.expected()
    is_open = machine.table.fits.copy()
    is_open[tried] = False
    rows, rng = np.flatnonzero(is_open), np.random.default_rng(len(tried))
    sd = np.sqrt(np.einsum("ij,jk,ik->i", slopes[rows], machine.covariance, slopes[rows]))
    hopeful = mean[rows] - sd[:, None]
    weights = [*np.eye(len(METRICS)), *rng.dirichlet(np.ones(len(METRICS)), WEIGHTINGS)]
    rows = rows[np.unique(np.concatenate([np.argsort(hopeful @ weight)[:NEAREST] for weight in weights]))]
    seen = mean[tried]
    apart = machine.sd_apart(slopes, rows, np.array(tried))
    if len(tried) % 2:
        front = pareto.front(-seen)
        nearest = np.repeat(apart[:, front].min(axis=1)[:, None], len(METRICS), axis=1)
        gain = acquisition.hypervolume_improvement(mean[rows], nearest, seen[front], rng)
        return int(rows[np.argmax(gain)])
    best = seen.argmin(axis=0)
    gains = [
        acquisition.expected_improvement(mean[rows, n], apart[:, best[n]], float(seen[best[n], n]))
        for n in range(len(METRICS))
    ]
    return int(rows[np.argmax(max(gains, key=lambda gain: float(gain.max())))])
