"""Devices: the table of cards, what people write for them, and the machine that they make."""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from autotune.advise.constants import CONSTANTS, Constants
from autotune.advise.names import closest, spelled
from autotune.errors import UserError
from autotune.forecast.cluster import NODE_LATENCY_S
from autotune.trial.profile import Machine

TABLE = Path(__file__).with_name("cards.csv")
GIB, GB = 2.0**30, 1e9
# `8xA100-40`, `2x8xH100`, `A100-40`, `8 H100`.
GPUS = re.compile(r"(?:(\d+)\s*[x*]\s*)?(?:(\d{1,3})\s*(?:[x*]|\s)\s*)?(\S.*)", re.IGNORECASE)
MOST_DEVICES = 16_384
PER_NODE = 8
# A hop of a collective between devices of a node: over NVLink, and over PCIe through the host.
LINK_LATENCY_S, PCIE_LATENCY_S = 1e-5, 2e-5
# Share of the stated bandwidth that a collective, or a copy, reaches.
REACHED = 0.75
NVLINK_GB_PER_S = 100


@dataclass(frozen=True, kw_only=True)
class Card:
    """A device, from its vendor's data sheet.

    Attributes:
        name: Its name.
        memory_gib: Memory that a process can have.
        bf16_tflops: Peak of dense bfloat16 products with fp32 sums; 0 if it has none.
        fp16_tflops: The same for fp16.
        fp32_tflops: Peak in fp32 without tensor cores, which is what PyTorch uses.
        memory_gb_per_s: Bandwidth of its memory.
        link_gb_per_s: Bandwidth to the other devices of a node, each way.
        host_link_gb_per_s: Bandwidth to the host, each way.
        network_gbit_per_s: Network of a node of eight, typically.
        host_gib: Host memory per device of such nodes, typically.
        generation: Of the architecture.
        source: Data sheet.
    """

    name: str
    memory_gib: float
    bf16_tflops: float
    fp16_tflops: float
    fp32_tflops: float
    memory_gb_per_s: float
    link_gb_per_s: float
    host_link_gb_per_s: float
    network_gbit_per_s: float
    host_gib: float
    generation: str
    source: str = ""

    @property
    def precision(self) -> str:
        """The 16-bit precision to train in."""
        return "bf16" if self.bf16_tflops else "fp16"


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Cards in nodes.

    Attributes:
        card: The card.
        count: Devices in all.
        per_node: Devices of a node.
        stated: What the user stated in place of the table's figures.
    """

    card: Card
    count: int
    per_node: int
    stated: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def nodes(self) -> int:
        """Nodes."""
        return -(-self.count // self.per_node)

    @property
    def local(self) -> int:
        """Devices of a node that is used."""
        return min(self.count, self.per_node)

    @property
    def memory_bytes(self) -> float:
        """Memory of a device."""
        return self.card.memory_gib * GIB

    @property
    def host_bytes(self) -> float:
        """Host memory of a node."""
        return self.stated.get("host_bytes", self.card.host_gib * GIB * self.per_node)

    def of(self, count: int) -> Devices:
        """Another number of the same devices: a node that has too few becomes one of eight, and several of those."""
        full = self.per_node if count <= self.per_node or self.nodes > 1 else min(count, PER_NODE)
        return replace(self, count=count, per_node=full)

    def describe(self) -> str:
        """As people write it."""
        nodes = f"{self.nodes} nodes of {self.per_node} x " if self.nodes > 1 else f"{self.count} x "
        return nodes + self.card.name

    def machine(self, c: Constants = CONSTANTS) -> Machine:
        """The rates of these devices as the formulas of step time take them."""
        card = self.card
        reached = c.efficiency.get(card.generation, c.efficiency["other"])
        flops = {"fp32": card.fp32_tflops * 1e12 * reached, "fp16": card.fp16_tflops * 1e12 * reached}
        if card.bf16_tflops:
            flops["bf16"] = flops["torch_autocast"] = card.bf16_tflops * 1e12 * reached
        nvlink = card.link_gb_per_s >= NVLINK_GB_PER_S
        several = self.count > 1
        return Machine(
            accelerator="cuda", world_size=self.count, flops=flops,
            memory_bytes_per_s=card.memory_gb_per_s * GB * REACHED,
            link_alpha_s=LINK_LATENCY_S if nvlink else PCIE_LATENCY_S,
            # Without NVLink all devices of a node share the host's bridges, and each byte passes one twice.
            link_bytes_per_s=card.link_gb_per_s * GB * REACHED * (1.0 if nvlink else 0.5),
            host_bytes_per_s=card.host_link_gb_per_s * GB * REACHED,
            host_memory_bytes_per_s=HOST_MEMORY_BYTES_PER_S / self.local,
            workspace_bytes=c.context_bytes + (c.nccl_bytes if several else 0.0),
            ranks_per_node=self.per_node if self.nodes > 1 else 0,
            node_bytes_per_s=self.stated.get("network_bytes_per_s", card.network_gbit_per_s * GB / 8),
            node_alpha_s=NODE_LATENCY_S, algorithm="ring",
        )  # fmt: skip


# Of a host with two sockets, for an optimizer that runs there; its ranks share it.
HOST_MEMORY_BYTES_PER_S = 2e11


@functools.cache
def known() -> dict[str, Card]:
    """The cards by each of their names as `spelled`."""
    found = {}
    with TABLE.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            numbers = {f.name: float(row[f.name]) for f in fields(Card) if f.type == "float"}
            card = Card(name=row["name"], generation=row["generation"], source=row["source"], **numbers)
            for name in filter(None, [row["name"], *row["also"].split(";")]):
                found[spelled(name)] = card
    return found


def find(name: str) -> Card:
    """The card that somebody names, as people spell it.

    Raises:
        UserError: There is none; it says which are near.
    """
    cards = known()
    wanted = spelled(re.sub(r"(?i)nvidia|amd|tesla|geforce|gib|gb|sxm\d?|hbm\d?e?|instinct", "", name))
    alone = {card.name: card for key, card in cards.items() if wanted and key.removeprefix("rtx").startswith(wanted)}
    card = cards.get(wanted) or cards.get(f"rtx{wanted}") or (next(iter(alone.values())) if len(alone) == 1 else None)
    if card is None:
        near = closest(wanted or spelled(name), {key: card.name for key, card in cards.items()})
        raise UserError(
            f"{name}: no card of this name in the table; the nearest are {', '.join(near)}; or state its"
            " --device-memory and --peak-flops"
        )
    return card


def stated_card(name: str, memory_gib: float, tflops: float) -> Card:
    """A card that is not in the table, from what the user states and typical figures for the rest."""
    return Card(
        name=name, memory_gib=memory_gib, bf16_tflops=tflops, fp16_tflops=tflops, fp32_tflops=tflops / 8,
        memory_gb_per_s=tflops * 5, link_gb_per_s=32, host_link_gb_per_s=32, network_gbit_per_s=100, host_gib=64,
        generation="other",
    )  # fmt: skip


def read_gpus(text: str, nodes: int | None = None) -> tuple[int, int, str]:
    """Devices in all, devices of a node, and the card's name of a text such as `8xA100-40`, `2x8xH100` or `4090`.

    Raises:
        UserError: It is no such text.
    """
    if behind := re.fullmatch(r"(.*[A-Za-z].*?)(?:\s+x\s*|\s*[*:]\s*)(\d{1,5})\s*", text, re.IGNORECASE):
        text = f"{behind[2]}x{behind[1]}"  # `A100 x 8`, `H100:8`
    match = GPUS.fullmatch(text.strip())
    if match is None or not re.search(r"[A-Za-z0-9]", match[3]):
        raise UserError(f"--gpus {text}: devices are needed, as in 8xA100-40, 2x8xH100 or 4x4090")
    first, second, name = match.groups()
    if second is None and first is not None and nodes is None:
        count, per_node = int(first), min(int(first), PER_NODE)
    else:
        many, each = (
            (int(first), int(second)) if second is not None and first is not None else (1, int(first or second or 1))
        )
        if nodes is not None and many > 1:
            raise UserError(f"--gpus {text} --nodes {nodes}: the nodes are there twice; leave one out")
        per_node, count = each, each * (nodes or many)
    if not (1 <= count <= MOST_DEVICES and per_node >= 1) or (nodes is not None and nodes < 1):
        raise UserError(f"--gpus {text}: {count} devices; between 1 and {MOST_DEVICES:,} are needed")
    if count > per_node and count % per_node:
        raise UserError(
            f"--gpus {text}: {count} devices are no whole number of nodes of {per_node}; state them, as in 2x8xH100"
        )
    return count, per_node, name
