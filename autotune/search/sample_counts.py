"""Samples to the target loss, and samples that a useful one costs: learned from trials against the global batch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autotune.forecast.features import FeatureTable
from autotune.forecast.regression import CalibratedGP, Data, fit
from autotune.scoring.metrics import GOODPUT
from autotune.search.observation import Observation

# A count is a constant and a part that grows with the batch; how far each of the two may be off.
SPREAD = np.array([4.0, 4.0])


@dataclass(frozen=True)
class SampleCounts:
    """Both counts as logarithms; each is fitted when it is first asked for, since most goals need none or one.

    Attributes:
        done: The trials that completed.
    """

    catalogue: FeatureTable
    world_size: int
    done: Sequence[Observation]

    @cached_property
    def to_target(self) -> CalibratedGP:
        """Samples to the target."""
        some = [t for t in self.done if t.good("time_to_loss_s")]
        y, extra = [], []
        for t in some:
            seconds = t.step_time_s(self.world_size)
            assert seconds is not None
            y.append(math.log(t.metrics["time_to_loss_s"] / seconds * t.candidate.global_batch_size(self.world_size)))
            extra.append(t.time_to_loss_sd())
        return fit(self._data(some, y, extra), self.catalogue.samples_sd, SPREAD)

    @cached_property
    def useful(self) -> CalibratedGP:
        """Samples that a useful one costs: one at the baseline's batch, more above it."""
        some = [t for t in self.done if t.good(GOODPUT) and t.good("samples_per_s")]
        y = [math.log(t.metrics["samples_per_s"] / t.metrics[GOODPUT]) for t in some]
        return fit(self._data(some, y), self.catalogue.samples_sd * 0.0, SPREAD)

    def of(self, metric: str) -> CalibratedGP:
        """The count that a metric rests on: that of useful samples for goodput, else that to the target."""
        return self.useful if metric == GOODPUT else self.to_target

    def _data(self, some: Sequence[Observation], y: Sequence[float], extra: Sequence[float] | None = None) -> Data:
        rows: NDArray[np.intp] = np.array([self.catalogue.row[t.candidate] for t in some], dtype=np.intp)
        return Data.of(self.catalogue.samples.take(rows), y, extra)
