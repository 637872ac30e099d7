"""Candidates as numeric columns for the cost models, and the interface `Prior` of a cost forecast."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from autotune.forecast.regression import Design, joined
from autotune.space.candidate import BATCH, FIELDS, Candidate
from autotune.space.deepspeed import Scalar, is_int
from autotune.trial.profile import Floats

# A knob with more whole-number values than this has a slope and a bend instead of an offset for each value.
MOST_LEVELS = 5
# Standard deviations of the coefficients, of log time: wide enough that a confident wrong prior recovers (narrow
# offsets never do).
MICRO_SD, BEND_SD, ACCUMULATION_SD, LEVEL_SD, SLOPE_SD = 0.15, 0.02, 0.1, 0.3, 0.15
# Kernels work in tiles: a micro-batch that is odd, or no multiple of 8, may cost more than its samples say.
TILE_SD = 0.15
# Deviation of each micro-batch and number of micro-steps from any curve: machines like some sizes. Knobs with more sizes
# than this have none.
SIZE_SD, MOST_SIZES = 0.15, 16
MEMORY_SHRINK = 0.6
# A change of level is as far as a few doublings of the batch.
LEVEL_DISTANCE, DOUBLING = 0.6, 0.4


@dataclass(frozen=True, kw_only=True)
class PriorPrediction:
    """Prediction of a prior for candidates, one row each.

    Attributes:
        time_terms: Seconds of an optimizer step, in parts that add up; one column is enough. Only ratios matter.
        memory_terms: Peak bytes of a rank, in parts that add up.
        time_spread: How far each time term may be off: standard deviation of its logarithm.
        memory_spread: The same for memory.
        time_scale_sd: The same for the time as a whole.
        memory_scale_sd: The same for the memory as a whole; small where bytes were counted and not guessed.
        doubt: Factor on the usual spread of the knobs' corrections; smaller where earlier trials showed them.
        samples_scale: What the samples to the target are made of, up to a factor: a constant, and a part that grows
            with the batch.
    """

    time_terms: Floats
    memory_terms: Floats
    time_spread: Floats
    memory_spread: Floats
    time_scale_sd: float = 2.0
    memory_scale_sd: float = 1.0
    doubt: float = 1.0
    samples_scale: tuple[float, float] = (1.0, 1.0)


class Prior(Protocol):
    """Anything that predicts step time and memory of candidates: a formula, a table, or another model."""

    def __call__(self, candidates: Sequence[Candidate]) -> PriorPrediction:
        """The prediction, one row for each candidate."""


class FeatureTable:
    """Candidates, each once, with the designs of the models; more can be added.

    Args:
        knobs: The values of each tuned knob; the columns follow from them and stay the same when candidates are added.
        reference: The candidate whose batch is the origin.
    """

    def __init__(self, knobs: Mapping[str, Sequence[Scalar]], reference: Candidate, prior: Prior) -> None:
        self.prior, self.reference = prior, reference
        own = {name: list(values) for name, values in knobs.items() if name not in BATCH}
        self.numeric = {name: _middle(values) for name, values in own.items() if _is_numeric(values)}
        self.levels = {
            # By its text a value is told apart from an equal one of another type (True and 1).
            name: {text: n for n, text in enumerate(dict.fromkeys(repr(v) for v in values if v is not None))}
            for name, values in own.items()
            if name not in self.numeric
        }
        self.sizes = {name: _sizes(knobs.get(name, ())) for name in BATCH}
        self.candidates: list[Candidate] = []
        self.accumulations: set[int] = set()
        self.row: dict[Candidate, int] = {}
        self._level_columns = [(name, level) for name, levels in self.levels.items() for level in levels]
        self.time: Design
        self.memory: Design
        self.samples: Design
        self.batch = np.zeros(0)
        self.present = np.zeros((0, len(self._level_columns)))
        self.numbers = {name: _some_numbers(knobs.get(name, ())) for name in (*BATCH, *self.numeric)}
        counts = [len(levels) for levels in self.levels.values()] + [3 * len(some) for some in self.numbers.values()]
        self.setting_of = np.repeat(np.eye(len(counts)), counts, axis=0)
        # Bytes take an eighth of the memory: of 100,000 candidates tens of megabytes.
        self.settings = np.zeros((0, len(self.setting_of)), np.uint8)

    def add(self, candidates: Sequence[Candidate]) -> None:
        """Adds those that are not there yet."""
        new = [c for c in dict.fromkeys(candidates) if c not in self.row]
        if not new:
            return
        self.row.update({c: len(self.candidates) + n for n, c in enumerate(new)})
        first = not self.candidates
        self.candidates += new
        self.accumulations |= {c.gradient_accumulation_steps for c in new}
        said = self.prior(new)
        present, slopes = self._present(new), self._slopes(new)
        micro = np.log2([c.micro_batch_size / self.reference.micro_batch_size for c in new])
        steps = np.log2([c.gradient_accumulation_steps / self.reference.gradient_accumulation_steps for c in new])
        batch = np.array([c.samples_per_rank for c in new], dtype=float)
        one = np.ones(len(new))
        sizes, own_sizes = np.array([c.micro_batch_size for c in new]), self._size_columns(new)
        linear = np.column_stack(
            [one, micro, micro**2, steps, sizes % 2 != 0, sizes % 8 != 0, present, slopes, slopes**2, own_sizes]
        )
        smooth = np.column_stack([micro * DOUBLING, steps * DOUBLING, present * LEVEL_DISTANCE, slopes])
        # What a number of micro-steps costs follows from the micro-steps, whatever else is set.
        levels = np.hstack([present, own_sizes[:, : len(self.sizes["micro_batch_size"])]])
        relative = batch / self.reference.samples_per_rank
        self.settings = np.vstack([self.settings, np.hstack([present.astype(np.uint8), self._number_columns(new)])])
        time = Design(terms=_positive(said.time_terms), linear=linear, smooth=smooth, levels=levels)
        memory = replace(time, terms=_positive(said.memory_terms))
        # Samples to a target: E_min (1 + B / B_noise) (McCandlish et al., 1812.06162): two terms with free scales.
        samples = Design(
            terms=np.column_stack([one, relative]) * said.samples_scale,
            linear=np.column_stack([one, present]),
            smooth=np.log2(batch)[:, None] * DOUBLING,
            levels=np.zeros((len(new), 0)),
        )
        if first:
            self.time, self.memory, self.samples, self.batch, self.present = time, memory, samples, batch, present
            self._set_deviations(said, present.shape[1], slopes.shape[1])
            return
        self.time, self.samples = joined([self.time, time]), joined([self.samples, samples])
        # Their features are the same ones, and of very many candidates large.
        self.memory = replace(self.time, terms=np.vstack([self.memory.terms, memory.terms]))
        self.batch, self.present = np.concatenate([self.batch, batch]), np.vstack([self.present, present])

    def _set_deviations(self, said: PriorPrediction, n_levels: int, n_slopes: int) -> None:
        """Sets the prior standard deviations of all coefficients."""
        n_sizes = sum(map(len, self.sizes.values()))
        common = [said.time_scale_sd, MICRO_SD, BEND_SD, ACCUMULATION_SD, TILE_SD, TILE_SD]
        levels, slopes = [LEVEL_SD] * n_levels, [SLOPE_SD] * n_slopes + [SLOPE_SD / 2] * n_slopes
        self.time_sd = np.array(common + levels + slopes + [SIZE_SD] * n_sizes)
        self.time_sd[1:] *= said.doubt  # how fast the machine is as a whole stays open
        self.memory_sd = self.time_sd * MEMORY_SHRINK
        self.memory_sd[len(self.time_sd) - n_sizes :] = 0.0  # no size of a batch takes less than a smaller one
        self.memory_sd[0] = said.memory_scale_sd
        self.samples_sd = np.array([0.0, *[0.03] * n_levels])
        self.time_spread = np.asarray(said.time_spread, float)
        self.memory_spread = np.asarray(said.memory_spread, float)

    def _present(self, candidates: Sequence[Candidate]) -> Floats:
        table = np.zeros((len(candidates), len(self._level_columns)))
        start = 0
        for name, levels in self.levels.items():
            for row, value in enumerate(_column(candidates, name)):
                if (column := levels.get(repr(value))) is not None:
                    table[row, start + column] = 1.0
            start += len(levels)
        return table

    def _size_columns(self, candidates: Sequence[Candidate]) -> Floats:
        """One column for each size of the batch's knobs, 1 where a candidate has it."""
        columns = [np.equal(_column(candidates, name), size) for name, sizes in self.sizes.items() for size in sizes]
        return np.array(columns, dtype=float).T.reshape(len(candidates), len(columns))

    def _number_columns(self, candidates: Sequence[Candidate]) -> NDArray[np.bool_]:
        """Three columns for each value of a knob of numbers, true where a candidate has it, has that or more, or that or less."""
        columns = []
        for name, numbers in self.numbers.items():
            own = np.array([value if is_int(value) else np.nan for value in _column(candidates, name)], dtype=float)
            columns += [
                compare(own, number) for number in numbers for compare in (np.equal, np.greater_equal, np.less_equal)
            ]
        return np.array(columns, dtype=bool).T.reshape(len(candidates), len(columns))

    def _slopes(self, candidates: Sequence[Candidate]) -> Floats:
        """Numeric knobs on a scale of -1 to 1; where one is not active, nothing."""
        columns = []
        for name, (middle, half) in self.numeric.items():
            values = _column(candidates, name)
            columns.append([0.0 if not value else (np.log2(float(value)) - middle) / half for value in values])
        return np.array(columns, dtype=float).T.reshape(len(candidates), len(self.numeric))


def knobs_of(candidates: Sequence[Candidate]) -> dict[str, list[Any]]:
    """Every knob that differs between candidates, with its values."""
    found: dict[str, dict[str, Any]] = {}
    for candidate in candidates:
        for name, value in candidate.values().items():
            found.setdefault(name, {}).setdefault(repr(value), value)
    absent = {name for name in found if name not in FIELDS}
    return {name: list(values.values()) for name, values in found.items() if len(values) > 1 or name in absent}


def _column(candidates: Sequence[Candidate], name: str) -> list[Any]:
    if hasattr(candidates[0], name):
        return [getattr(c, name) for c in candidates]
    return [next((value for path, value in c.config if path == name), None) for c in candidates]


def _is_numeric(values: Sequence[Scalar]) -> bool:
    numbers = [v for v in values if is_int(v) and v > 0]
    return len(numbers) > MOST_LEVELS and len(numbers) == len([v for v in values if v is not None])


def _sizes(values: Sequence[Scalar]) -> list[int]:
    """The sizes that are told apart each."""
    found = sorted(set(filter(is_int, values)))
    return found if 1 < len(found) <= MOST_SIZES else []


def _some_numbers(values: Sequence[Scalar]) -> list[int]:
    """The numbers among values; of very many some, at equal distances."""
    found = sorted(set(filter(is_int, values)))
    return found[:: -(-len(found) // MOST_SIZES) or 1]


def _middle(values: Sequence[Scalar]) -> tuple[float, float]:
    logs = [np.log2(v) for v in values if is_int(v) and v > 0]
    return float((min(logs) + max(logs)) / 2), float(max(1e-9, (max(logs) - min(logs)) / 2))


def _positive(terms: Floats) -> Floats:
    """Terms without what no logarithm can take: a prior may say zero, infinity or nothing (NaN)."""
    finite = np.where(np.isfinite(terms), np.maximum(terms, 0.0), 0.0)
    empty = finite.sum(axis=1) <= 0
    typical = np.median(finite[~empty], axis=0) if (~empty).any() else np.ones(terms.shape[1])
    return np.where(empty[:, None], np.maximum(typical, 1e-30), finite)
