"""Forecasts for a larger cluster than the one that was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autotune.errors import UserError
from autotune.forecast.communication import ALGORITHMS
from autotune.forecast.predictor import ForecastInputs, Predictor, Term, probability_below
from autotune.scoring import scaling
from autotune.scoring.scaling import Mode, Run
from autotune.space.candidate import Candidate
from autotune.space.legality import why_illegal
from autotune.system.units import parse_bandwidth, parse_latency
from autotune.trial.profile import Machine

# Links that are only stated: how far what collectives reach in training may be off what is said of them.
LINK_SD = {"communication": 0.3, "messages": 0.5}
# Where nobody says (Ethernet or InfiniBand between nodes, as a collective's hop sees it).
NODE_LATENCY_S = 2e-5
MOST_ROWS = 12


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The cluster that is thought of.

    Attributes:
        devices: Devices, one rank each.
        per_node: Devices of a node.
        intra_bytes_per_s: Bandwidth that a collective reaches within a node; None for the one measured here.
        inter_bytes_per_s: Bandwidth of a node to the others, each way, shared by its devices.
        intra_latency_s: Latency of a message within a node; None for the one measured here.
        inter_latency_s: The same between nodes; None for a usual one.
        algorithm: How collectives go; see `predictors.communication`.
    """

    devices: int
    per_node: int
    intra_bytes_per_s: float | None = None
    inter_bytes_per_s: float | None = None
    intra_latency_s: float | None = None
    inter_latency_s: float | None = None
    algorithm: str = "auto"

    def __post_init__(self) -> None:
        if self.devices < 1 or self.per_node < 1:
            raise UserError(f"project: {self.devices} devices, {self.per_node} a node: both must be at least 1")
        if self.devices > self.per_node and self.devices % self.per_node:
            raise UserError(f"project: {self.devices} devices are no whole number of nodes of {self.per_node}")
        if self.devices > self.per_node and self.inter_bytes_per_s is None:
            raise UserError(
                f"project: {self.devices} devices are {self.devices // self.per_node} nodes, so say how fast a node is connected:"
                " --inter-bandwidth, as in 50GB/s or 400Gbit/s"
            )
        if self.algorithm not in ALGORITHMS:
            raise UserError(f"project: --algorithm {self.algorithm}: one of {', '.join(ALGORITHMS)} is needed")

    @classmethod
    def of(cls, devices: int, per_node: int, links: Mapping[str, str | None], algorithm: str) -> Cluster:
        """The cluster that options mean.

        Args:
            devices: Devices.
            per_node: Devices of a node.
            links: `intra_bandwidth`, `inter_bandwidth`, `intra_latency` and `inter_latency` as texts, as far as they
                were given.
            algorithm: How collectives go.

        Raises:
            UserError: One of them is wrong.
        """
        found = {}
        for end in ("intra", "inter"):
            speed, delay = links.get(f"{end}_bandwidth"), links.get(f"{end}_latency")
            found[f"{end}_bytes_per_s"] = parse_bandwidth(speed, f"--{end}-bandwidth") if speed is not None else None
            found[f"{end}_latency_s"] = parse_latency(delay, f"--{end}-latency") if delay is not None else None
        return cls(devices=devices, per_node=per_node, algorithm=algorithm, **found)

    def machine(self, here: Machine, n: int) -> Machine:
        """The cluster's machine for so many ranks, with the rates that a device has here.

        Raises:
            UserError: Nothing is known of the links within a node.
        """
        known = here.world_size > 1 and here.measured
        if n > 1 and self.intra_bytes_per_s is None and self.per_node > 1 and not known:
            raise UserError(
                "project: the study ran on one rank, so no link between devices was measured: say how fast it is, --intra-bandwidth, as in"
                " 300GB/s"
            )
        several = n > self.per_node
        link = self.intra_bytes_per_s or here.link_bytes_per_s
        return replace(
            here,
            world_size=n,
            link_bytes_per_s=link if self.per_node > 1 else self.inter_bytes_per_s or link,
            link_alpha_s=here.link_alpha_s if self.intra_latency_s is None else self.intra_latency_s,
            ranks_per_node=self.per_node if several else 0,
            node_bytes_per_s=self.inter_bytes_per_s or 0.0,
            node_alpha_s=NODE_LATENCY_S if self.inter_latency_s is None else self.inter_latency_s,
            algorithm=self.algorithm,
        )

    def counts(self, fewest: int) -> list[int]:
        """Rank counts from the study's up to all devices, doubling, as far as they fill nodes."""
        found = [min(fewest, self.devices)]
        while found[-1] * 2 < self.devices:
            found.append(found[-1] * 2)
        whole = [n for n in found if n <= self.per_node or n % self.per_node == 0]
        return sorted({*whole[-(MOST_ROWS - 1) :], self.devices})

    def spread(self, n: int) -> Mapping[str, float] | None:
        """How sure the links of so many ranks are; None where they are those that were measured."""
        return LINK_SD if n > self.per_node or self.intra_bytes_per_s is not None else None


@dataclass(frozen=True, kw_only=True)
class Projected:
    """A configuration on so many devices.

    Attributes:
        world_size: Devices.
        candidate: The configuration.
        step_time_s: Step time with its 90 % interval.
        peak_memory_bytes: Peak of a rank, likewise.
        samples_per_s: Throughput.
        samples_per_step: Samples of an optimizer step.
        communication: Share of the step that is communication.
        fits: Probability that it fits the device; None where no limit is known.
        speedup: Throughput over that of the fewest devices.
        efficiency: Speed-up over the ideal one.
        efficiency_90: Its interval, as far as the step time on so many devices is unsure.
        impossible: Why DeepSpeed would refuse it there; empty if it would not.
    """

    world_size: int
    candidate: Candidate
    step_time_s: Term
    peak_memory_bytes: Term
    samples_per_s: float
    samples_per_step: int
    communication: float
    fits: float | None
    speedup: float = 1.0
    efficiency: float = 1.0
    efficiency_90: tuple[float, float] = (1.0, 1.0)
    impossible: str = ""


class Projector:
    """A study's model, carried to a cluster.

    Args:
        predictor: Corrected by what the study measured.
        cluster: Where to.
        foreseen: What the predictor rests on.
        limit_bytes: Memory of a device; None for that of the study's.
    """

    def __init__(
        self, predictor: Predictor, cluster: Cluster, foreseen: ForecastInputs, limit_bytes: float | None = None
    ) -> None:
        self.predictor, self.cluster, self.foreseen = predictor, cluster, foreseen
        self.limit_bytes = limit_bytes or foreseen.share_bytes

    def one(self, candidate: Candidate, n: int) -> Projected:
        """A configuration on so many devices."""
        machine = self.cluster.machine(self.foreseen.machine, n)
        there = self.predictor.on(machine, self.cluster.spread(n))
        time, memory = there.step_time(candidate), there.memory(candidate)
        waiting = sum(term.value for term in time.terms if term.name in LINK_SD)
        samples = candidate.global_batch_size(n)
        per_node = min(n, self.cluster.per_node)
        setting = replace(
            self.foreseen.setting, world_size=n, ranks_per_node=per_node, global_batch=None, n_samples=None
        )
        return Projected(
            world_size=n, candidate=candidate, step_time_s=time.total, peak_memory_bytes=memory.total,
            samples_per_s=samples / time.total.value, samples_per_step=samples, communication=waiting / time.total.value,
            fits=probability_below(memory, self.limit_bytes) if self.limit_bytes else None,
            impossible=why_illegal(candidate, setting) or "",
        )  # fmt: skip

    def over_devices(self, candidate: Candidate, mode: Mode) -> list[Projected]:
        """A configuration of the study on ever more devices.

        Args:
            candidate: As the study ran it.
            mode: `weak`, every device does what it did; `strong`, the global batch stays, by less accumulation.

        Raises:
            UserError: The global batch cannot be divided so far.
        """
        fewest = self.foreseen.world_size
        counts = self.cluster.counts(fewest)
        if mode == "strong":
            steps, rest = divmod(candidate.gradient_accumulation_steps * fewest, max(counts))
            if rest or not steps:
                raise UserError(
                    f"project: a global batch of {candidate.global_batch_size(fewest)} in micro-batches of {candidate.micro_batch_size}"
                    f" cannot be split over {max(counts)} devices; leave --strong out, or choose a configuration with a smaller micro-batch"
                )
            candidate = replace(candidate, gradient_accumulation_steps=steps)
        found = {n: self.one(each, n) for n, each in scaling.candidates(candidate, counts, mode).items()}
        runs = [
            Run(
                world_size=n,
                round=0,
                samples_per_s=row.samples_per_s,
                step_s=row.step_time_s.value,
                samples_per_step=row.samples_per_step,
            )
            for n, row in found.items()
        ]
        rows = []
        for scale in scaling.scaling(runs, None):
            row = found[scale.world_size]
            low, high = (
                scale.efficiency * row.step_time_s.value / end for end in (row.step_time_s.high, row.step_time_s.low)
            )
            interval = (low, high) if scale.world_size != min(found) else (1.0, 1.0)
            rows.append(replace(row, speedup=scale.speedup, efficiency=scale.efficiency, efficiency_90=interval))
        return rows
