"""Data sheets of accelerator cards by name: memory, peak rates, bandwidth, link; read from `cards.csv`."""

import csv
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Words that make a name another card's: a part of one (MIG), one with other clocks or another chip. A number with such a
# letter is a virtual one's share of memory (`A100-10C`).
_OTHER = {"mig", "laptop", "mobile", "q", "d", "ti", "super", "blackwell"}
_VIRTUAL = re.compile(r"\d+[abcq]")
# The column that a precision computes in; torch's autocast multiplies in the 16-bit type that it names.
_COLUMNS = {"torch_autocast": "bf16", "torch_autocast_fp16": "fp16"}


@dataclass(frozen=True, kw_only=True)
class Card:
    """A card by its maker's data sheet.

    Attributes:
        name: Its short name, as `--device` takes it.
        aliases: Sets of words; a device whose name holds all words of one is this card.
        memory_bytes: Memory of one device.
        usable_bytes: Of that, what a process can have: without what the driver and error correction keep.
        flops: Dense peak FLOP/s by precision (`bf16`, `fp16`, `tf32`, `fp32`); without those that it only emulates.
        memory_bytes_per_s: Peak memory bandwidth.
        link_bytes_per_s: NVLink of one device in one direction, all links together; PCIe for cards without.
        host_link_bytes_per_s: PCIe (or what is there in its place) to the host in one direction.
        network_bytes_per_s: Network of a node of eight of them, as such nodes typically have it.
        host_bytes: Host memory per device of such a node, typically.
        capability: CUDA compute capability, or AMD's architecture.
        source: The document of the figures.
    """

    name: str
    aliases: tuple[frozenset[str], ...]
    memory_bytes: int
    usable_bytes: float
    flops: dict[str, float]
    memory_bytes_per_s: float
    link_bytes_per_s: float
    host_link_bytes_per_s: float
    network_bytes_per_s: float
    host_bytes: float
    capability: str
    source: str

    def peak_flops(self, precision: str, *, tf32: bool = False) -> float | None:
        """Returns the dense peak FLOP/s of a candidate's precision; None for one that the card only emulates.

        Args:
            precision: As in a candidate.
            tf32: Whether fp32 products may use TensorFloat-32.
        """
        column = _COLUMNS.get(precision, precision)
        return self.flops.get("tf32" if column == "fp32" and tf32 and "tf32" in self.flops else column)


@cache
def cards() -> tuple[Card, ...]:
    """Returns all known cards."""
    with open(Path(__file__).with_name("cards.csv"), newline="") as file:
        return tuple(_card(row) for row in csv.DictReader(file))


def find_card(name: str) -> Card | None:
    """Returns the card that a driver or a user names; None for an unknown one and for a part of one (MIG)."""
    words = _words(name)
    if any(map(_VIRTUAL.fullmatch, words)):
        return None
    other = words & _OTHER
    found = [
        (max(map(len, held)), card)
        for card in cards()
        if (held := [alias for alias in card.aliases if other <= alias <= words])
    ]
    return max(found, key=lambda pair: pair[0])[1] if found else None  # the first of those alike


def unread_number(name: str, card: Card) -> str | None:
    """Returns a number of a name that the card which it was taken for does not have: another memory, or a count."""
    own = {f"{round(card.memory_bytes / 2**30)}gb"}.union(*card.aliases)
    return next((word for word in sorted(_words(name) - own) if re.fullmatch(r"\d+gb|\d", word)), None)


def _words(name: str) -> frozenset[str]:
    """The words of a name in small letters; `80GB`, `80G`, `80GiB` and `80` are one word."""
    words = filter(None, re.split(r"[^a-z0-9.]+", name.lower()))
    return frozenset(
        re.sub(r"^(\d+)gi?b?$|^(\d{2,3})$", lambda size: f"{size[1] or size[2]}gb", word) for word in words
    )


def _card(row: dict[str, str]) -> Card:
    rates = {name: row[f"{name}_tflops"] for name in ("bf16", "fp16", "tf32", "fp32")}
    return Card(
        name=row["card"],
        aliases=tuple(_words(alias) for alias in [row["card"], *row["aliases"].split("|")]),
        memory_bytes=round(float(row["memory_gib"]) * 2**30),
        usable_bytes=float(row["usable_gib"]) * 2**30,
        flops={name: float(rate) * 1e12 for name, rate in rates.items() if rate},
        memory_bytes_per_s=float(row["memory_gb_s"]) * 1e9,
        link_bytes_per_s=float(row["link_gb_s"]) * 1e9,
        host_link_bytes_per_s=float(row["host_link_gb_s"]) * 1e9,
        network_bytes_per_s=float(row["network_gbit_s"]) * 1e9 / 8,
        host_bytes=float(row["host_gib"]) * 2**30,
        capability=row["capability"],
        source=row["source"],
    )
