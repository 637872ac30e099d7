"""Quantities in words: bytes, times, counts and rates, formatted for people and parsed from what they write."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.errors import UserError

TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
BYTE_UNITS = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
# Bandwidths are decimal, as vendors state them.
BANDWIDTH_UNITS = ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s"))
FLOP_UNITS = ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"), (1e3, "kFLOP/s"), (1.0, "FLOP/s"))
LADDERS = {"s": TIME_UNITS, "B": BYTE_UNITS, "B/s": BANDWIDTH_UNITS, "FLOP/s": FLOP_UNITS}
DURATION_UNITS = ((31_557_600, "y"), (86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
# From this number of a unit on, the next larger unit reads better, even if the smallest value is then below one.
MAX_OF_A_UNIT = 10_000


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Unit and decimals in which several values are written, so that they can be compared.

    Attributes:
        factor: Number that the values are divided by, to be in `unit`.
    """

    factor: float
    unit: str
    decimals: int

    def number(self, value: float) -> str:
        """Returns the value without its unit."""
        return f"{value / self.factor:,.{self.decimals}f}"

    def quantity(self, value: float) -> str:
        """Returns the value with its unit."""
        return f"{self.number(value)} {self.unit}".rstrip()

    def interval(self, low: float, high: float, dash: str = "–") -> str:
        """Returns both ends of an interval, without the unit."""
        return f"{self.number(low)}{dash}{self.number(high)}"


def scale_for(unit: str, values: Iterable[float]) -> Scale:
    """Returns the scale for some values: the smallest gets three significant digits, the largest at most five.

    Args:
        unit: Unit of the values; `s`, `B` and `B/s` are scaled to a larger or smaller one.
        values: The values; zeros and infinities have no influence.
    """
    sizes = sorted(abs(value) for value in values if value and math.isfinite(value))
    low, high = (sizes[0], sizes[-1]) if sizes else (1.0, 1.0)
    factor, chosen = _choose_unit(LADDERS.get(unit, ((1.0, unit),)), low, high)
    digits = min(2 - math.floor(math.log10(low / factor)), 4 - math.floor(math.log10(high / factor)))
    return Scale(factor=factor, unit=chosen, decimals=0 if chosen == "B" else max(0, min(3, digits)))


def _choose_unit(units: Sequence[tuple[float, str]], low: float, high: float) -> tuple[float, str]:
    """Returns the largest unit in which the smallest value is at least 1 (a time: 0.1, as in 0.76 s beside 3.66 s)."""
    least = 0.1 if units is TIME_UNITS else 1.0
    fits = [i for i, (factor, _) in enumerate(units) if low >= least * factor and high >= factor]
    chosen = fits[0] if fits else len(units) - 1
    while chosen > 0 and high / units[chosen][0] >= MAX_OF_A_UNIT:
        chosen -= 1
    return units[chosen]


def format_quantity(value: float, unit: str) -> str:
    """Returns one value with its unit and three significant digits: `48.2 ms`, `1,234 samples/s`."""
    return scale_for(unit, [value]).quantity(value)


def rounded(value: float) -> float:
    """Returns a number rounded to two decimals, a small one to three significant digits, for pages that print all digits."""
    if not value or not math.isfinite(value):
        return value
    return round(value, max(2, 2 - math.floor(math.log10(abs(value)))))


def format_bytes(n_bytes: float) -> str:
    """Returns a size with three significant digits: `15.6 GiB`."""
    return format_quantity(n_bytes, "B")


def format_seconds(seconds: float) -> str:
    """Returns a measured time with three significant digits: `48.2 ms`; for wall times see `format_duration`."""
    return format_quantity(seconds, "s")


def format_duration(seconds: float) -> str:
    """Returns a wall time in its two largest units: `8.4 s`, `3 min 42 s`, `2 h 5 min`, `1 d`, `3 y 20 d`."""
    if seconds < 59.95:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole = round(seconds)
    at = next(i for i, (length, _) in enumerate(DURATION_UNITS) if whole >= length)
    (length, name), (shorter, shorter_name) = DURATION_UNITS[at : at + 2]
    rest = whole % length // shorter
    return f"{whole // length:,} {name}" + (f" {rest} {shorter_name}" if rest else "")


def format_count(number: float, letters: str = "TGMk") -> str:
    """Returns a number in short: 3,312,384 is `3.31 M`; `letters` are those of 1e12, 1e9, 1e6 and 1e3."""
    for letter, factor in zip(letters, (1e12, 1e9, 1e6, 1e3), strict=True):
        if (short := number / factor) >= 0.9995:  # else it is at most 999 of the next smaller unit
            return f"{short:.3g} {letter}" if short < 999.5 else f"{short:,.0f} {letter}"
    return f"{number:g}"


BYTES = {"B": 1}
BYTES |= {f"{prefix}B": 1000**n for n, prefix in enumerate("KMGT", 1)}
BYTES |= {f"{prefix}iB": 1024**n for n, prefix in enumerate("KMGT", 1)}
# A part of an amount: a number, and a unit or none.
AMOUNT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")
LARGEST_AMOUNT = 1e18
LEAST_MEMORY = 2**20
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def parse_bytes(value: Any) -> int:
    """Returns the bytes of a number or a text such as `4GiB` or `500 MB`."""
    return round(_parse_amount(value, BYTES, "4GiB"))


def parse_memory(value: Any) -> int:
    """Returns the bytes of a device's or a machine's memory; a small number without a unit was not meant in bytes."""
    n_bytes = parse_bytes(value)
    if n_bytes < LEAST_MEMORY and not (isinstance(value, str) and value.strip()[-1:].isalpha()):
        raise ValueError(f"{value!r} is {n_bytes} bytes, in which nothing fits; state a unit, as in 8GiB")
    return n_bytes


def parse_seconds(value: Any) -> float:
    """Returns the seconds of a number or a text such as `10m`, `1h30m` or `250ms`."""
    return _parse_amount(value, SECONDS, "1h30m")


def _parse_amount(value: Any, units: Mapping[str, float], example: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return finite(value)
    text = value.strip() if isinstance(value, str) else ""
    lower = {unit.lower(): factor for unit, factor in units.items()}
    parts, at = list[tuple[str, str]](), 0
    # Part by part: one expression for all parts would backtrack over every way to split a long row of digits.
    while found := AMOUNT.match(text, at):
        parts.append((found[1], found[2].lower()))
        at = found.end()
    if not parts or at < len(text) or any(unit not in lower for _, unit in parts if unit or len(parts) > 1):
        raise ValueError(
            f"{value!r} is not a number or a number with a unit, as in {example!r}; units: {', '.join(units)}"
        )
    return finite(sum(float(number) * (lower[unit] if unit else 1.0) for number, unit in parts))


def finite(value: int | float) -> float:
    """Returns the number as a float.

    Raises:
        ValueError: The number is infinite, not a number, or too large.
    """
    if not abs(value) <= LARGEST_AMOUNT:  # also true of NaN
        said = str(value) if isinstance(value, float) else f"a whole number of {value.bit_length()} bits"
        raise ValueError(f"{said} is not a finite number below {LARGEST_AMOUNT:g}")
    return float(value)


def parse_size(text: str, option: str) -> float:
    """Returns the bytes of memory of an option's text, more than 0."""
    try:
        n_bytes = parse_memory(text)
    except ValueError as error:
        raise UserError(f"{option}: {error}") from None
    if not n_bytes:
        raise UserError(f"{option} {text}: more than 0 is needed")
    return float(n_bytes)


BANDWIDTH = re.compile(r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([kKMGT]?)(i?)(B|bit|b)\s*(?:/s|ps)")


def parse_bandwidth(text: str, option: str) -> float:
    """Returns the bytes per second of a text such as `300GB/s`, `50 GiB/s` or `400Gbit/s`."""
    match = BANDWIDTH.fullmatch(text.strip())
    value = float(match[1]) if match else 0.0
    if match is None or value <= 0:
        raise UserError(f"{option} {text}: a bandwidth is needed, as in 300GB/s or 400Gbit/s")
    power = " KMGT".index(match[2].upper() or " ")
    factor = 1024.0**power if match[3] else 1000.0**power
    return value * factor / (1 if match[4] == "B" else 8)


def parse_latency(text: str, option: str) -> float:
    """Returns the seconds of a text such as `5us`."""
    try:
        return parse_seconds(text)
    except ValueError:
        raise UserError(f"{option} {text}: a time is needed, as in 5us or 0.5ms") from None
