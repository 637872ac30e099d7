"""Quantities for people: one unit and one number of decimals for all values that are compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autotune.objective import METRICS

TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
SIZES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
# Above this many of a unit the next larger one reads better, even if the smallest value then is below one.
MOST = 10_000


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How values of one metric are written, so that they can be read against each other.

    Attributes:
        factor: What the values are divided by.
        unit: The unit then.
        decimals: Digits after the point.
    """

    factor: float
    unit: str
    decimals: int

    def number(self, value: float) -> str:
        """The value without its unit."""
        return f"{value / self.factor:,.{self.decimals}f}"

    def quantity(self, value: float) -> str:
        """The value with its unit."""
        return f"{self.number(value)} {self.unit}".rstrip()

    def interval(self, low: float, high: float, dash: str = "–") -> str:
        """Both ends, without the unit."""
        return f"{self.number(low)}{dash}{self.number(high)}"


def scale(metric: str, values: Iterable[float]) -> Scale:
    """The scale for these values of a metric: the smallest has three significant digits, the largest at most five."""
    sizes = sorted(abs(value) for value in values if value and math.isfinite(value))
    low, high = (sizes[0], sizes[-1]) if sizes else (1.0, 1.0)
    base = METRICS[metric].unit if metric in METRICS else ""
    factor, unit = _unit({"s": TIMES, "B": SIZES}.get(base, ((1.0, base),)), low, high)
    digits = min(2 - math.floor(math.log10(low / factor)), 4 - math.floor(math.log10(high / factor)))
    return Scale(factor=factor, unit=unit, decimals=0 if unit == "B" else max(0, min(3, digits)))


def _unit(units: Sequence[tuple[float, str]], low: float, high: float) -> tuple[float, str]:
    """The largest unit that leaves the smallest value at least one (of times: a tenth, as in 0.76 s beside 3.66 s)."""
    share = 0.1 if units is TIMES else 1.0
    fits = [i for i, (factor, _) in enumerate(units) if low >= share * factor and high >= factor]
    chosen = fits[0] if fits else len(units) - 1
    while chosen > 0 and high / units[chosen][0] >= MOST:
        chosen -= 1
    return units[chosen]


def quantity(metric: str, value: float) -> str:
    """One value alone, with its unit."""
    return scale(metric, [value]).quantity(value)


def duration(seconds: float) -> str:
    """A wall time: `8.4 s`, `3 min 42 s`, `2 h 5 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def count(number: float) -> str:
    """A large number in short: 3,312,384 is `3.31 M`."""
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g} {letter}"
    return f"{number:g}"


def memory(size: float) -> str:
    """Bytes for people: `15.6 GiB`."""
    return quantity("peak_memory_bytes", size)
