"""`autotune project`: what a study's configurations would take on a larger cluster, from its calibrated model and the cluster's links."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune import UserError
from autotune.analysis import scaling
from autotune.analysis.scaling import Mode, Run
from autotune.candidate import Candidate, Scalar
from autotune.forecasting import SURE, Foreseen, foresee_workload, measured_in
from autotune.objective import parse_seconds
from autotune.predictors.communication import ALGORITHMS
from autotune.predictors.forecast import Predictor, Term, probability_below, settings_of
from autotune.predictors.profile import Machine
from autotune.report import units
from autotune.spec import StudySpec

# Links that are only stated: how far what collectives reach in training may be off what is said of them.
LINK_SD = {"communication": 0.3, "messages": 0.5}
# Where nobody says (Ethernet or InfiniBand between nodes, as a collective's hop sees it).
NODE_LATENCY_S = 2e-5
MOST_ROWS = 12
BANDWIDTH = re.compile(r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([kKMGT]?)(i?)(B|bit|b)\s*(?:/s|ps)")


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
            links: `intra_bandwidth`, `inter_bandwidth`, `intra_latency` and `inter_latency` as texts, as far as they were given.
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
        self, predictor: Predictor, cluster: Cluster, foreseen: Foreseen, limit_bytes: float | None = None
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
            fits=probability_below(memory, self.limit_bytes) if self.limit_bytes else None, impossible=candidate.illegal(setting) or "",
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


@dataclass(frozen=True, kw_only=True)
class Projection:
    """What `autotune project` found.

    Attributes:
        study: The study.
        trial: The trial whose configuration is carried over the devices; None where it was made up.
        mode: `weak` or `strong`.
        cluster: The cluster.
        rows: That configuration, from few devices to all.
        others: The other configurations of the front on all devices, fastest first.
        n_measured: Measurements that corrected the model.
        notes: What to know.
    """

    study: str
    trial: int | None
    mode: Mode
    cluster: Cluster
    rows: Sequence[Projected]
    others: Sequence[tuple[int, Projected]]
    n_measured: int
    notes: Sequence[str]

    def to_data(self) -> dict[str, Any]:
        """For programs."""
        return {
            "study": self.study, "trial": self.trial, "mode": self.mode, "cluster": asdict(self.cluster), "n_measured": self.n_measured,
            "rows": [_data(row) for row in self.rows], "others": [{"trial": n, **_data(row)} for n, row in self.others],
            "notes": list(self.notes),
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """For people."""
        cluster = self.cluster
        whose = f", trial {self.trial}" if self.trial is not None else ""
        yield f"{self.study}{whose}: {self.rows[-1].candidate.describe()}"
        nodes = f"{cluster.devices} devices, {min(cluster.per_node, cluster.devices)} a node"
        kept = "every device does what it did" if self.mode == "weak" else "the global batch stays"
        yield f"{nodes}; {self.mode} scaling: {kept}; intervals hold 90 %"
        yield ""
        yield from _table(_cells(self.rows, "devices", [str(row.world_size) for row in self.rows]))
        if self.others:
            yield ""
            yield f"The front's other configurations on {cluster.devices} devices, by throughput:"
            rows = [row for _, row in self.others]
            yield from _table(_cells(rows, "trial", [str(n) for n, _ in self.others], describe=True))
        yield ""
        yield from (f"note: {note}" for note in self.notes)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be carried to the cluster.

    Attributes:
        pick: Which pick of the study.
        trial: This trial of its front instead.
        settings: Knobs that differ from it.
        mode: `weak` or `strong`.
        device_memory_bytes: Memory of a device there; None for the same as here.
    """

    pick: str = "recommended"
    trial: int | None = None
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    mode: Mode = "weak"
    device_memory_bytes: float | None = None


def project(folder: Path, cluster: Cluster, question: Question) -> Projection:
    """What a study's configurations would take on a cluster.

    Args:
        folder: The study's.
        cluster: Where to.
        question: What is asked.

    Raises:
        UserError: The study has no such configuration, or it cannot be carried there.
    """
    front, chosen = _chosen(folder, question.pick, question.trial)
    spec = StudySpec.of(folder / "study.yaml", {})
    base = Candidate.of({**chosen["candidate"], **question.settings})
    foreseen = foresee_workload(spec)
    predictor, n_measured = calibrated(foreseen, folder, spec.target, front)
    projector = Projector(predictor, cluster, foreseen, question.device_memory_bytes)
    rows = projector.over_devices(base, question.mode)
    others = []
    if question.mode == "weak" and not question.settings:
        left = [row for row in front if row["trial"] != chosen["trial"]]
        there = [(row["trial"], projector.one(Candidate.of(row["candidate"]), cluster.devices)) for row in left]
        others = sorted(((n, row) for n, row in there if not row.impossible), key=lambda pair: -pair[1].samples_per_s)
    return Projection(
        study=folder.name, trial=None if question.settings else chosen["trial"], mode=question.mode, cluster=cluster, rows=rows,
        others=others, n_measured=n_measured, notes=list(_notes(cluster, foreseen, rows, n_measured)),
    )  # fmt: skip


def calibrated(
    foreseen: Foreseen, folder: Path, target: Path, front: Sequence[Mapping[str, Any]]
) -> tuple[Predictor, int]:
    """The study's predictor, corrected by its trials and by the runs of `autotune scale`; where these are gone, by its front."""
    predictor = Predictor(foreseen.profile, foreseen.machine, settings_of(foreseen.base_config))
    n = 0
    for part, counts in ((folder, [foreseen.world_size]), (folder / "scaling", range(1, 65))):
        if not (part / "trials").is_dir():
            continue
        for ranks in counts:
            machine = replace(foreseen.machine, world_size=ranks)
            for candidate, metrics in measured_in(part, target, ranks).items():
                predictor.learn(candidate, **metrics, machine=machine)
                n += 1
    if not n:
        for row in front:
            metrics = row["metrics"]
            peak, step = metrics.get("peak_memory_bytes"), metrics.get("step_time_s")
            predictor.learn(Candidate.of(row["candidate"]), peak_memory_bytes=peak, step_time_s=step)
            n += 1
    return predictor, n


def parse_bandwidth(text: str, option: str) -> float:
    """Bytes per second from a text such as `300GB/s`, `50 GiB/s` or `400Gbit/s`.

    Raises:
        UserError: It is none.
    """
    match = BANDWIDTH.fullmatch(text.strip())
    value = float(match[1]) if match else 0.0
    if match is None or value <= 0:
        raise UserError(f"{option} {text}: a bandwidth is needed, as in 300GB/s or 400Gbit/s")
    power = " KMGT".index(match[2].upper() or " ")
    factor = 1024.0**power if match[3] else 1000.0**power
    return value * factor / (1 if match[4] == "B" else 8)


def parse_latency(text: str, option: str) -> float:
    """Seconds from a text such as `5us`.

    Raises:
        UserError: It is none.
    """
    try:
        return parse_seconds(text)
    except ValueError:
        raise UserError(f"{option} {text}: a time is needed, as in 5us or 0.5ms") from None


def study_folder(study: str | None, studies: Path) -> Path:
    """The folder of a study that has come to a recommendation; without a name of the only one.

    Raises:
        UserError: There is none, or several.
    """
    ready = sorted(path.parent.name for path in studies.glob("*/recommended.json"))
    if study is None:
        if len(ready) != 1:
            said = f"name one of {', '.join(ready)}" if ready else "run a study first: autotune run TARGET"
            raise UserError(f"project: {len(ready)} studies in {studies} have a recommendation; {said}")
        study = ready[0]
    name = Path(study).parent.name if study.endswith((".yaml", ".yml")) else Path(study).name
    if name not in ready:
        raise UserError(
            f"project: {study}: no study with a recommendation in {studies}; known: {', '.join(ready) or 'none'}"
        )
    return studies / name


def _chosen(folder: Path, pick: str, trial: int | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The front with the baseline, and the row that is carried over."""
    try:
        kept = json.loads((folder / "recommended.json").read_text())
        front = json.loads((folder / "front.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"project: {folder.name}: {error}; run the study again") from None
    baseline = kept.get("baseline")
    rows = front + ([baseline] if baseline and baseline["trial"] not in {row["trial"] for row in front} else [])
    if trial is not None:
        found = next((row for row in rows if row["trial"] == trial), None)
        if found is None:
            raise UserError(
                f"project: trial {trial} is not on the front; there are {', '.join(str(row['trial']) for row in rows)}"
            )
        return rows, found
    if pick not in kept["picks"]:
        raise UserError(f"project: --pick {pick}: {folder.name} has {', '.join(kept['picks'])}")
    return rows, kept["picks"][pick]


def _notes(cluster: Cluster, foreseen: Foreseen, rows: Sequence[Projected], n_measured: int) -> Iterator[str]:
    last = rows[-1]
    yield f"corrected by {n_measured} measurements on {foreseen.world_size} rank(s) here; a device there is taken to compute like one here"
    if foreseen.machine.accelerator == "cpu":
        yield "the study ran on a CPU, whose ranks share cores: a cluster's links and memory are in this, the speed of its devices is not"
    if cluster.devices > cluster.per_node and cluster.inter_latency_s is None:
        yield f"latency between nodes is taken as {NODE_LATENCY_S * 1e6:.0f} us; --inter-latency says otherwise"
    if cluster.intra_bytes_per_s is None and cluster.per_node > 1:
        yield "the link within a node is taken to be the one measured here; --intra-bandwidth says otherwise"
    if last.impossible:
        yield f"on {last.world_size} devices DeepSpeed refuses it: {last.impossible}"
    if last.fits is not None and last.fits < SURE:
        yield f"it may not fit a device there (probability {last.fits:.0%}): --device-memory says what one has"
    yield "waiting for stragglers, congestion and failures is not in it"


def _cells(rows: Sequence[Projected], first: str, names: Sequence[str], *, describe: bool = False) -> list[list[str]]:
    times = units.scale("step_time_s", [end for row in rows for end in (row.step_time_s.low, row.step_time_s.high)])
    sizes = units.scale("peak_memory_bytes", [row.peak_memory_bytes.value for row in rows])
    header = [
        first,
        "global batch",
        f"step time ({times.unit})",
        "interval",
        "samples/s",
        "communication",
        f"memory ({sizes.unit})",
        "fits",
    ]
    header += ["configuration"] if describe else ["efficiency", "interval"]
    found = [header]
    for name, row in zip(names, rows, strict=True):
        fits = "-" if row.fits is None else "yes" if row.fits >= SURE else "maybe" if row.fits > 1 - SURE else "no"
        cells = [
            name, f"{row.samples_per_step:,}", times.number(row.step_time_s.value),
            times.interval(row.step_time_s.low, row.step_time_s.high),
            f"{row.samples_per_s:,.4g}", f"{row.communication:.0%}", sizes.number(row.peak_memory_bytes.value), fits,
        ]  # fmt: skip
        low, high = row.efficiency_90
        found.append(
            [
                *cells,
                *(
                    [row.candidate.describe()]
                    if describe
                    else [f"{row.efficiency:.0%}", f"{low:.0%}–{min(high, 9.99):.0%}"]
                ),
            ]
        )
    return found


def _table(rows: list[list[str]]) -> Iterator[str]:
    wide = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    last = len(wide) - 1
    for row in rows:
        text = rows[0][last] == "configuration"
        cells = [
            cell if i == last and text else cell.rjust(size)
            for i, (cell, size) in enumerate(zip(row, wide, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _data(row: Projected) -> dict[str, Any]:
    return {**asdict(row), "candidate": row.candidate.values(), "words": row.candidate.describe()}
