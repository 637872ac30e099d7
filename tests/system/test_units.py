"""Quantities in words."""

from __future__ import annotations

import re

import pytest

from autotune.errors import UserError
from autotune.system import units

MIB, GIB = 2.0**20, 2.0**30


@pytest.mark.parametrize(
    ("n_bytes", "shown"),
    [(0, "0 B"), (512, "512 B"), (1536, "1.50 KiB"), (61 * MIB, "61.0 MiB"), (1023 * MIB, "1,023 MiB"), (15.6 * GIB, "15.6 GiB")],
)  # fmt: skip
def test_a_size_has_three_digits_and_one_unit(n_bytes: float, shown: str) -> None:
    assert units.format_bytes(n_bytes) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(7.1e-6, "7.10 us"), (0.0482, "48.2 ms"), (1.5, "1.50 s"), (220, "220 s")]
)
def test_a_measured_time_has_three_digits(seconds: float, shown: str) -> None:
    assert units.format_seconds(seconds) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.04, "0 s"), (8.42, "8.4 s"), (30, "30 s"), (59.97, "1 min"), (222.4, "3 min 42 s"), (3599.7, "1 h"),
     (7500, "2 h 5 min"), (90_000, "1 d 1 h")],
)  # fmt: skip
def test_a_duration_has_two_units(seconds: float, shown: str) -> None:
    assert units.format_duration(seconds) == shown


@pytest.mark.parametrize(
    ("number", "shown"),
    [(12, "12"), (0.5, "0.5"), (999, "999"), (3_312_384, "3.31 M"), (999_885_952, "1 G"), (124e9, "124 G"), (2e15, "2,000 T")],
)  # fmt: skip
def test_a_count_is_short(number: float, shown: str) -> None:
    assert units.format_count(number) == shown


def test_rates_keep_their_unit_but_bytes_a_second_are_scaled() -> None:
    assert units.format_quantity(25e9, "B/s") == "25.0 GB/s"
    assert units.format_quantity(1234.4, "samples/s") == "1,234 samples/s"


def test_values_that_are_compared_share_unit_and_decimals() -> None:
    scale = units.scale_for("s", [0.0482, 0.131])
    assert [scale.quantity(0.0482), scale.quantity(0.131)] == ["48.2 ms", "131.0 ms"]
    assert scale.interval(0.0482, 0.131) == "48.2–131.0"


@pytest.mark.parametrize(
    ("text", "value"),
    [("300GB/s", 3e11), ("400Gbit/s", 5e10), ("100Gbps", 1.25e10), ("50 GiB/s", 50 * 2**30), ("1.5e3MB/s", 1.5e9)],
)
def test_bandwidths_are_read_in_bytes_and_bits(text: str, value: float) -> None:
    assert units.parse_bandwidth(text, "--x") == pytest.approx(value)


@pytest.mark.parametrize("text", ["fast", "300", "0GB/s", "-3GB/s", "300GB"])
def test_what_is_no_bandwidth_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"--x {text}: a bandwidth is needed")):
        units.parse_bandwidth(text, "--x")


@pytest.mark.parametrize(("text", "seconds"), [("5us", 5e-6), ("0.5ms", 5e-4)])
def test_latencies_are_times(text: str, seconds: float) -> None:
    assert units.parse_latency(text, "--x") == pytest.approx(seconds)
    with pytest.raises(UserError, match="--x soon: a time is needed"):
        units.parse_latency("soon", "--x")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (332.63001, 332.63),
        (0.063001, 0.063),
        (0.0041234, 0.00412),
        (0.0, 0.0),
        (-0.00512345, -0.00512),
        (4309.3035, 4309.3),
    ],
)
def test_a_small_number_keeps_three_digits_where_all_are_printed(value: float, shown: float) -> None:
    """A CPU time of 4 ms was 0.0 s among a trial's attributes, and a throughput of 0.004 samples/s nothing."""
    assert units.rounded(value) == shown
