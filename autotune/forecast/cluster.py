"""Forecasts for a larger cluster than the one that was measured."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autotune.errors import UserError
from autotune.forecast.communication import ALGORITHMS, NODE_LATENCY_S
from autotune.forecast.predictor import ForecastInputs, Predictor, Term, probability_below
from autotune.scoring import scaling
from autotune.space.candidate import Candidate
from autotune.space.legality import why_illegal
from autotune.system.units import parse_bandwidth, parse_latency
from autotune.trial.profile import Machine

# Uncertainty (log sd) of links whose rates are stated and not measured: collectives in training may reach less.
LINK_SD = {"communication": 0.3, "messages": 0.5, "groups": 0.5}
MOST_ROWS = 12


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The cluster of a projection.

    Attributes:
        devices: Devices, one rank each.
        per_node: Devices of a node.
        intra_bytes_per_s: Bandwidth of a collective within a node; None for the measured one.
        inter_bytes_per_s: Bandwidth of a node to the others, each way, shared by its devices.
        intra_latency_s: Latency of a message within a node; None for the measured one.
        inter_latency_s: Latency of a message between nodes; None for `NODE_LATENCY_S`.
        algorithm: Algorithm of collectives; see `forecast.communication`.
    """

    devices: int
    per_node: int
    intra_bytes_per_s: float | None = None
    inter_bytes_per_s: float | None = None
    intra_latency_s: float | None = None
    inter_latency_s: float | None = None
    algorithm: str = "auto"

    def __post_init__(self) -> None:
        n, several = self.devices, self.devices > self.per_node
        if n < 1 or self.per_node < 1:
            raise UserError(f"project: {n} devices, {self.per_node} a node: both must be at least 1")
        if several and n % self.per_node:
            raise UserError(f"project: {n} devices are no whole number of nodes of {self.per_node}")
        if several and self.inter_bytes_per_s is None:
            raise UserError(
                f"project: {n} devices are {n // self.per_node} nodes; give the bandwidth between nodes:"
                " --inter-bandwidth, as in 50GB/s or 400Gbit/s"
            )
        if self.algorithm not in ALGORITHMS:
            raise UserError(f"project: --algorithm {self.algorithm}: one of {', '.join(ALGORITHMS)} is needed")

    @classmethod
    def of(cls, devices: int, per_node: int, links: Mapping[str, str | None], algorithm: str) -> "Cluster":
        """Returns the cluster of command-line options.

        Args:
            links: `intra_bandwidth`, `inter_bandwidth`, `intra_latency` and `inter_latency` as texts, if given.
        """
        found = {}
        for end in ("intra", "inter"):
            speed, delay = links.get(f"{end}_bandwidth"), links.get(f"{end}_latency")
            found[f"{end}_bytes_per_s"] = parse_bandwidth(speed, f"--{end}-bandwidth") if speed is not None else None
            found[f"{end}_latency_s"] = parse_latency(delay, f"--{end}-latency") if delay is not None else None
        return cls(devices=devices, per_node=per_node, algorithm=algorithm, **found)

    def machine(self, here: Machine, n: int) -> Machine:
        """Returns the machine of `n` ranks of the cluster, with the measured rates of a device.

        Raises:
            UserError: The bandwidth within a node is unknown.
        """
        measured = here.world_size > 1 and here.measured
        if n > 1 and self.per_node > 1 and self.intra_bytes_per_s is None and not measured:
            raise UserError(
                "project: the study ran on one rank, so no link between devices was measured; give its bandwidth:"
                " --intra-bandwidth, as in 300GB/s"
            )
        link = self.intra_bytes_per_s or here.link_bytes_per_s
        return replace(
            here,
            world_size=n,
            n_cores=0,  # its ranks have devices
            link_bytes_per_s=link if self.per_node > 1 else self.inter_bytes_per_s or link,
            link_alpha_s=here.link_alpha_s if self.intra_latency_s is None else self.intra_latency_s,
            ranks_per_node=self.per_node if n > self.per_node else 0,
            node_bytes_per_s=self.inter_bytes_per_s or 0.0,
            node_alpha_s=NODE_LATENCY_S if self.inter_latency_s is None else self.inter_latency_s,
            algorithm=self.algorithm,
        )

    def counts(self, fewest: int) -> list[int]:
        """Returns the rank counts of the table: doubled from the study's up to all devices, filling whole nodes."""
        found = [min(fewest, self.devices)]
        while found[-1] * 2 < self.devices:
            found.append(found[-1] * 2)
        whole = [n for n in found if n <= self.per_node or n % self.per_node == 0]
        return sorted({*whole[-(MOST_ROWS - 1) :], self.devices})

    def spread(self, n: int) -> Mapping[str, float] | None:
        """Returns the uncertainty of the links of `n` ranks; None for links that were measured."""
        return LINK_SD if n > self.per_node or self.intra_bytes_per_s is not None else None


@dataclass(frozen=True, kw_only=True)
class Projected:
    """Forecast of a configuration on a number of devices.

    Attributes:
        step_time_s: Step time with its 90 % interval.
        peak_memory_bytes: Peak of a rank with its 90 % interval.
        communication: Share of the step that is communication.
        fits: Probability that it fits the device; None without a known limit.
        speedup: Throughput over that of the fewest devices.
        efficiency: Speed-up over the ideal one.
        efficiency_90: Its 90 % interval, from that of the step time.
        impossible: Reason why DeepSpeed would refuse it; empty if it would not.
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
    """Projects configurations of a study to a cluster.

    Args:
        predictor: The predictor, corrected by the study's measurements.
        limit_bytes: Memory of a device of the cluster; None for that of the study's devices.
    """

    def __init__(
        self, predictor: Predictor, cluster: Cluster, foreseen: ForecastInputs, limit_bytes: float | None = None
    ) -> None:
        self.predictor, self.cluster, self.foreseen = predictor, cluster, foreseen
        self.limit_bytes = limit_bytes or foreseen.share_bytes

    def one(self, candidate: Candidate, n: int) -> Projected:
        """Returns the forecast of a configuration on `n` devices."""
        machine = self._machine(candidate, n)
        there = self.predictor.on(machine, self.cluster.spread(n))
        time, memory = there.step_time(candidate), there.memory(candidate)
        waiting = sum(term.value for term in time.terms if term.name in LINK_SD)
        copy = self.foreseen.ranks_per_copy
        samples = candidate.global_batch_size(n // copy)
        unbounded = replace(self.foreseen.setting, global_batch=None, n_samples=None)
        per_node = max(1, min(n, self.cluster.per_node) // copy)
        setting = replace(unbounded, world_size=max(1, n // copy), ranks_per_node=per_node)
        split = f"the script trains a copy of the model on {copy} ranks, and {n} are no multiple of that"
        return Projected(
            world_size=n, candidate=candidate, step_time_s=time.total, peak_memory_bytes=memory.total,
            samples_per_s=samples / time.total.value, samples_per_step=samples,
            communication=waiting / time.total.value,
            fits=probability_below(memory, self.limit_bytes) if self.limit_bytes else None,
            impossible=split if n % copy else why_illegal(candidate, setting) or "",
        )  # fmt: skip

    def _machine(self, candidate: Candidate, n: int) -> Machine:
        """The machine of `n` ranks; of several nodes with the link within a node as the trials found it, where it was measured."""
        cluster, here = self.cluster, self.foreseen.machine
        machine = cluster.machine(here, n)
        if not machine.ranks_per_node or cluster.per_node == 1 or cluster.intra_bytes_per_s is not None:
            return machine
        # What was learned of collectives is not applied to those between nodes, which would then seem quicker than those within.
        found = self.predictor.on(cluster.machine(here, cluster.per_node)).corrections(candidate)
        alpha_s = machine.link_alpha_s * (1.0 if cluster.intra_latency_s is not None else found.get("messages", 1.0))
        rate = machine.link_bytes_per_s / found.get("communication", 1.0)
        return replace(machine, link_bytes_per_s=rate, link_alpha_s=alpha_s)

    def over_devices(self, candidate: Candidate, mode: scaling.Mode) -> list[Projected]:
        """Returns the forecasts of a configuration on the cluster's rank counts.

        Args:
            mode: `weak` keeps the batch of a device; `strong` keeps the global batch, by less accumulation.

        Raises:
            UserError: The global batch cannot be divided by the devices.
        """
        fewest = self.foreseen.world_size
        counts = self.cluster.counts(fewest)
        if mode == "strong":
            steps, rest = divmod(candidate.gradient_accumulation_steps * fewest, max(counts))
            if rest or not steps:
                batch = candidate.global_batch_size(self.foreseen.setting.world_size)
                micro = candidate.micro_batch_size
                raise UserError(
                    f"project: a global batch of {batch} in micro-batches of {micro} cannot be split over {max(counts)}"
                    " devices; leave --strong out, or choose a configuration with a smaller micro-batch"
                )
            candidate = replace(candidate, gradient_accumulation_steps=steps)
            # The counts between the study's and the cluster's are chosen here, and not by the user.
            counts = [n for n in counts if steps * max(counts) % n == 0]
        found = {n: self.one(each, n) for n, each in scaling.candidates(candidate, counts, mode).items()}
        # Fewer devices than a group of ranks needs, for example, can run nothing.
        found = {n: row for n, row in found.items() if not row.impossible or n == max(found)}
        first, rows = found[min(found)], []
        for row in found.values():
            speedup = row.samples_per_s / first.samples_per_s
            efficiency, time = speedup * first.world_size / row.world_size, row.step_time_s
            low, high = (efficiency * time.value / end for end in (time.high, time.low))
            interval = (low, high) if row is not first else (1.0, 1.0)
            rows.append(replace(row, speedup=speedup, efficiency=efficiency, efficiency_90=interval))
        return rows
