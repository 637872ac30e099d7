"""Devices in nodes: what people write for them, and the machine that they make."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autotune.advise.constants import CONSTANTS, Constants
from autotune.advise.names import closest
from autotune.errors import UserError
from autotune.forecast.communication import NODE_LATENCY_S
from autotune.space.torch_settings import has_tf32
from autotune.system.cards import Card, cards, find_card, unread_number
from autotune.system.units import format_bytes
from autotune.trial.profile import HOST_OP_S, Machine

GIB, GB = 2.0**30, 1e9
# `8xA100-40`, `2x8xH100`, `A100-40`, `8 H100`.
GPUS = re.compile(r"(?:(\d+)\s*[x*]\s*)?(?:(\d{1,3})\s*(?:[x*]|\s)\s*)?(\S.*)", re.IGNORECASE)
# The number behind the card: `A100 x 8`, `H100:8`; `a100x8`, but not `RTX4090` or `MI300X`.
BEHIND = (
    re.compile(r"(.*[A-Za-z].*?)(?:\s+x\s*|\s*[*:]\s*)(\d{1,5})\s*", re.IGNORECASE),
    re.compile(r"(.*[A-Za-z]\w*\d\w*)x(\d{1,3})\s*", re.IGNORECASE),
)
# What stands between two kinds of devices.
SEVERAL = re.compile(r"(?<=\w)\s*(?:[,;+&]|\band\b)\s*(?=\w)", re.IGNORECASE)
# Words for a machine of eight cards.
WHOLE_NODE = re.compile(r"\b[dh]gx\b", re.IGNORECASE)
MOST_DEVICES = 16_384
PER_NODE = 8
# A hop of a collective between devices of a node: over NVLink, and over PCIe through the host.
LINK_LATENCY_S, PCIE_LATENCY_S = 1e-5, 2e-5
# Share of the stated bandwidth that a collective, or a copy, reaches.
REACHED = 0.75
NVLINK_BYTES_PER_S = 100 * GB
# Of a host with two sockets, for an optimizer that runs there; its ranks share it.
HOST_MEMORY_BYTES_PER_S = 2e11
# By compute capability: generations of which published runs tell how much of the peak products reach.
GENERATIONS = {"8.0": "ampere", "8.6": "ampere", "9.0": "hopper"}


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Cards in nodes.

    Attributes:
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
        return self.card.usable_bytes

    @property
    def host_bytes(self) -> float:
        """Host memory of a node."""
        return self.stated.get("host_bytes", self.card.host_bytes * self.per_node)

    @property
    def precision(self) -> str:
        """The 16-bit precision to train in."""
        return "bf16" if "bf16" in self.card.flops else "fp16"

    def of(self, count: int) -> "Devices":
        """Another number of the same devices: a node of fewer than eight that has too few becomes one of eight, and several of those."""
        full = self.per_node if self.nodes > 1 else max(self.per_node, min(count, PER_NODE))
        return replace(self, count=count, per_node=full)

    def describe(self) -> str:
        """As people write it."""
        nodes = f"{self.nodes} nodes of {self.per_node} x " if self.nodes > 1 else f"{self.count} x "
        return nodes + self.card.name

    def machine(self, c: Constants = CONSTANTS) -> Machine:
        """The rates of these devices as the formulas of step time take them."""
        card = self.card
        reached = c.efficiency.get(GENERATIONS.get(card.capability, "other"), c.efficiency["other"])
        flops = {name: rate * reached for name, rate in card.flops.items()}
        if not has_tf32("cuda", card.capability):
            flops.pop("tf32", None)
        autocast = {"torch_autocast": "bf16", "torch_autocast_fp16": "fp16"}
        flops |= {name: flops[own] for name, own in autocast.items() if own in flops}
        nvlink = card.link_bytes_per_s >= NVLINK_BYTES_PER_S
        several = self.count > 1
        return Machine(
            accelerator="cuda", world_size=self.count, flops=flops,
            memory_bytes_per_s=card.memory_bytes_per_s * REACHED,
            link_alpha_s=LINK_LATENCY_S if nvlink else PCIE_LATENCY_S,
            # Without NVLink all devices of a node share the host's bridges, and each byte passes one twice.
            link_bytes_per_s=card.link_bytes_per_s * REACHED * (1.0 if nvlink else 0.5),
            host_bytes_per_s=card.host_link_bytes_per_s * REACHED,
            host_memory_bytes_per_s=HOST_MEMORY_BYTES_PER_S / self.local,
            workspace_bytes=c.context_bytes + (c.nccl_bytes if several else 0.0),
            device_bytes=self.memory_bytes,
            ranks_per_node=self.per_node if self.nodes > 1 else 0,
            node_bytes_per_s=self.stated.get("network_bytes_per_s", card.network_bytes_per_s),
            node_alpha_s=NODE_LATENCY_S, algorithm="ring", host_op_s=HOST_OP_S,
        )  # fmt: skip


def device_card(name: str, stated: Mapping[str, float], option: str = "--gpus") -> Card:
    """A card of the table with what the user states over it, or one that is stated alone.

    Args:
        name: As people spell it.
        stated: `memory_bytes` and `flops` (of 16-bit products), if given.
        option: What it was given with.
    """
    memory, flops = stated.get("memory_bytes"), stated.get("flops")
    card = find_card(name) or find_card(re.sub(r"s\b", "", name, flags=re.IGNORECASE))  # `8 H100s`
    if card and not memory and (number := unread_number(name, card)):
        raise UserError(
            f"{option}: {name}: {number!r} is not the memory of the {card.name} ({format_bytes(card.memory_bytes)}) and not read as"
            " a number of devices: write 8xA100-40, or state the memory with --device-memory"
        )
    if card is None:
        if not (memory and flops):
            near = closest(name.lower(), {each.name.lower(): each.name for each in cards()})
            more = "; or state --device-memory and --peak-flops" if option == "--gpus" else ""
            raise UserError(f"{option}: unknown card {name!r}; the nearest are {', '.join(near)}{more}")
        # Typical ratios of current cards without NVLink.
        card = Card(
            name=name, aliases=(), memory_bytes=round(memory), usable_bytes=memory, memory_bytes_per_s=flops / 200,
            flops={"bf16": flops, "fp16": flops, "fp32": flops / 8}, link_bytes_per_s=32 * GB,
            host_link_bytes_per_s=32 * GB, network_bytes_per_s=100 * GB / 8, host_bytes=64 * GIB,
            capability="", source="stated",
        )  # fmt: skip
    rates = {key: flops if flops and key in ("bf16", "fp16") else rate for key, rate in card.flops.items()}
    return replace(card, usable_bytes=memory or card.usable_bytes, flops=rates)


def read_devices(text: str, option: str) -> Devices:
    """Returns the devices of a text such as `8xA100-40` or `H100`, which an option has."""
    count, per_node, name = read_gpus(text, option=option)
    return Devices(card=device_card(name, {}, option), count=count, per_node=per_node)


def read_gpus(text: str, nodes: int | None = None, option: str = "--gpus") -> tuple[int, int, str]:
    """Devices in all, devices of a node, and the card's name of a text such as `8xA100-40`, `2x8xH100` or `4090`."""
    if nodes is not None and nodes < 1:
        raise UserError(f"--nodes {nodes}: at least 1 is needed")
    text = text.replace("×", "x")
    if several := SEVERAL.search(text):
        raise UserError(f"{option} {text}: one kind of device is needed, and {several[0].strip()!r} stands between two")
    if behind := next(filter(None, (form.fullmatch(text) for form in BEHIND)), None):
        text = f"{behind[2]}x{behind[1]}"
    match = GPUS.fullmatch(text.strip())
    if match is None or not match[3][0].isalnum():
        raise UserError(f"{option} {text}: devices are needed, as in 8xA100-40, 2x8xH100 or 4x4090")
    first, second, name = match.groups()
    if second is None and WHOLE_NODE.search(name):
        first, second = first or "1", str(PER_NODE)
    if second is None and first is not None and nodes is None:
        count, per_node = int(first), min(int(first), PER_NODE)
    else:
        many, each = (
            (int(first), int(second)) if second is not None and first is not None else (1, int(first or second or 1))
        )
        if nodes is not None and many > 1:
            raise UserError(f"{option} {text} --nodes {nodes}: the nodes are there twice; leave one out")
        per_node, count = each, each * (nodes or many)
    if not (1 <= count <= MOST_DEVICES and per_node >= 1):
        raise UserError(f"{option} {text}: {count} devices; between 1 and {MOST_DEVICES:,} are needed")
    if count > per_node and count % per_node:
        raise UserError(
            f"{option} {text}: {count} devices are no whole number of nodes of {per_node}; state them, as in 2x8xH100"
        )
    return count, per_node, name
