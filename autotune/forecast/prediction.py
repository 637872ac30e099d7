"""The forecast of one configuration as a record: for Python, for programs and for people."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from autotune.forecast.words import BINDS, memory_by_part, verdict
from autotune.scoring.quantiles import Z95
from autotune.system.units import format_bytes, format_seconds, scale_for

if TYPE_CHECKING:
    from autotune.forecast.predictor import Forecast
    from autotune.space.candidate import Candidate
    from autotune.space.deepspeed import Scalar

# The largest micro-batch that is tried.
MOST_SAMPLES = 4096
# Share of a step from which a single term binds it.
BINDING_SHARE = 0.5
# What a notebook shows of a prediction; its text is for `print`.
SHOWN = (
    "candidate ranks peak_memory_bytes step_time_s samples_per_s tokens_per_s device_memory_bytes fits_probability"
    " largest_micro_batch_size binds measured notes"
).split()


class Interval(NamedTuple):
    """A figure with its interval, in the unit that its name ends with.

    Attributes:
        low: Lower end: of a 95 % interval for what is measured or advised, of a 90 % one for what is predicted.
        high: Upper end of the same interval.
    """

    value: float
    low: float
    high: float

    @classmethod
    def around(cls, value: float, log_sd: float) -> Interval:
        """The 95 % interval of a figure whose logarithm scatters normally."""
        return cls(value=value, low=value * math.exp(-Z95 * log_sd), high=value * math.exp(Z95 * log_sd))

    def times(self, factor: float) -> Interval:
        """The interval of a multiple."""
        return Interval(*(end * factor for end in self))


@dataclass(frozen=True, kw_only=True, repr=False)
class Prediction:
    """What a configuration will need, before it runs; intervals are 90 %. As text it is what `autotune predict` prints.

    Attributes:
        data_parallel: Ranks that read different samples; fewer than ranks where a script makes groups of them.
        memory: Peak bytes of a rank, by part.
        step_time: Seconds of an optimizer step, by part.
        device_memory_bytes: What a rank may use.
        largest_micro_batch_size: The largest that surely fits, all else the same; None if none does.
        largest_tensor_bytes: Largest tensor of the forward pass, often the logits.
        tokens_per_sample: Of an average sample; None where samples are not token sequences.
        measured: What the study measured of this very configuration, by metric; empty if it did not.
        study: Study whose trials corrected the forecast.
        notes: What to know, in sentences.
        device: What a rank computes on, in words.
    """

    configuration: Candidate
    ranks: int
    data_parallel: int
    memory: Forecast
    step_time: Forecast
    device_memory_bytes: float
    fits_probability: float
    largest_micro_batch_size: int | None
    largest_tensor_bytes: float
    tokens_per_sample: float | None
    measured: Mapping[str, float]
    study: str
    notes: Sequence[str]
    device: str

    @property
    def candidate(self) -> dict[str, Scalar]:
        """Its knobs by name."""
        return self.configuration.values()

    @property
    def peak_memory_bytes(self) -> Interval:
        """The peak memory of a rank."""
        return _total(self.memory)

    @property
    def step_time_s(self) -> Interval:
        """The time of an optimizer step."""
        return _total(self.step_time)

    @property
    def samples_per_s(self) -> Interval:
        """The throughput of all ranks together."""
        samples, time = self.configuration.global_batch_size(self.data_parallel), self.step_time_s
        return Interval(samples / time.value, samples / time.high, samples / time.low)

    @property
    def tokens_per_s(self) -> Interval | None:
        """The throughput in tokens; None where samples are not token sequences."""
        return self.samples_per_s.times(self.tokens_per_sample) if self.tokens_per_sample else None

    @property
    def memory_terms_bytes(self) -> dict[str, float]:
        """What the memory is made of."""
        return {term.name: term.value for term in self.memory.terms}

    @property
    def step_time_terms_s(self) -> dict[str, float]:
        """What the step time is made of."""
        return {term.name: term.value for term in self.step_time.terms}

    @property
    def binds(self) -> dict[str, str]:
        """What limits `memory` and `time`, in words."""
        space, time = (max(said.terms, key=lambda term: term.value) for said in (self.memory, self.step_time))
        share = time.value / self.step_time.total.value
        alone = "" if share >= BINDING_SHARE else " (among others)"
        return {
            "memory": f"{space.name}, {space.value / self.memory.total.value:.0%} of the peak",
            "time": f"{BINDS[time.name]}, {share:.0%} of the step{alone}",
        }

    def to_data(self) -> dict[str, Any]:
        """Returns the forecast for programs."""
        return {
            "candidate": self.candidate,
            "ranks": self.ranks,
            "device": self.device,
            "peak_memory_bytes": self.peak_memory_bytes._asdict() | {"terms": [asdict(term) for term in self.memory.terms]},
            "step_time_s": self.step_time_s._asdict() | {"terms": [asdict(term) for term in self.step_time.terms]},
            "samples_per_s": self.samples_per_s._asdict(),
            "tokens_per_s": tokens._asdict() if (tokens := self.tokens_per_s) else None,
            "device_memory_bytes": self.device_memory_bytes,
            "fits_probability": self.fits_probability,
            "largest_micro_batch_size": self.largest_micro_batch_size,
            "largest_tensor_bytes": self.largest_tensor_bytes,
            "binds": self.binds,
            "measured": dict(self.measured),
            "corrected_by": {
                "study": self.study, "memory": self.memory.n_measured, "step_time": self.step_time.n_measured,
            },
            "notes": list(self.notes),
        }  # fmt: skip

    def __repr__(self) -> str:
        return f"Prediction({', '.join(f'{name}={getattr(self, name)!r}' for name in SHOWN)})"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        total, time, limit = self.peak_memory_bytes, self.step_time_s, self.device_memory_bytes
        yield f"{self.configuration.describe()}, {self.ranks} rank(s), on {self.device}"
        yield ""
        needed = f"{format_bytes(total.value)} ({format_bytes(total.low)} to {format_bytes(total.high)})"
        yield f"memory      {needed} of a rank's {format_bytes(limit)}: {verdict(self.fits_probability)}"
        terms = self.memory_terms_bytes
        shown = self.largest_tensor_bytes > 0.1 * terms["activations"]
        notes = {"activations": f"  (the largest tensor {format_bytes(self.largest_tensor_bytes)})"} if shown else {}
        yield from memory_by_part(terms, total.value, notes, width=12)
        yield ""
        yield f"step time   {format_seconds(time.value)} ({format_seconds(time.low)} to {format_seconds(time.high)})"
        terms = self.step_time_terms_s
        for name, value in sorted(terms.items(), key=lambda term: -term[1]):
            if value >= 0.02 * sum(terms.values()):
                yield f"  {name:<14}{format_seconds(value):>10}"
        value, low, high = self.samples_per_s
        scale = scale_for("samples/s", self.samples_per_s)
        yield f"throughput  {scale.quantity(value)} ({scale.number(low)} to {scale.number(high)})"
        yield ""
        yield f"binds       memory: {self.binds['memory']}"
        yield f"            time: {self.binds['time']}"
        largest = self.largest_micro_batch_size
        at_least = "at least " if largest == MOST_SAMPLES else ""
        yield f"largest micro-batch that surely fits: {at_least}{largest}" if largest else "no micro-batch surely fits"
        if self.measured:
            peak, step = format_bytes(self.measured["peak_memory_bytes"]), format_seconds(self.measured["step_time_s"])
            yield f"measured    {peak}, {step} in study {self.study}, which this forecast knows"
        n = self.memory.n_measured
        of = f"{n} trial(s) of study {self.study}" if n else "no trial: `autotune run` makes it surer"
        yield f"corrected by {of}"
        yield from (f"note: {note}" for note in self.notes)


def _total(said: Forecast) -> Interval:
    return Interval(said.total.value, said.total.low, said.total.high)
