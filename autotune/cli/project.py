"""The command `project`: forecasts of a study's configurations on a larger cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from autotune.cli.options import AsJson, option, read_settings
from autotune.cli.terminal import fitted
from autotune.errors import UserError
from autotune.system.units import format_quantity, parse_size
from autotune.trial.folder import read_record

if TYPE_CHECKING:
    from autotune.forecast.cluster import Cluster, Projected
    from autotune.forecast.predictor import ForecastInputs, Predictor
    from autotune.scoring.scaling import Mode
    from autotune.space.deepspeed import Scalar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is needed of a row of `front.json`, or of a pick or the baseline in `recommended.json`."""

    trial: int
    candidate: dict[str, str | bool | int | float | None]
    metrics: dict[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Recommended:
    """What is needed of `recommended.json`."""

    picks: dict[str, Row]
    baseline: Row | None = None


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Forecasts on a cluster, for people and for programs.

    Attributes:
        trial: The trial whose configuration is forecast; None if `--set` changed it.
        mode: `weak` or `strong`.
        rows: Its forecasts, from few devices to all.
        others: The other configurations of the front on all devices, fastest first.
        n_measured: Measurements that corrected the model.
        device: What the study's ranks computed on.
    """

    study: str
    trial: int | None
    mode: Mode
    cluster: Cluster
    rows: Sequence[Projected]
    others: Sequence[tuple[int, Projected]]
    n_measured: int
    notes: Sequence[str]
    device: str

    def to_data(self) -> dict[str, Any]:
        """The forecasts for programs."""
        return {
            "study": self.study, "trial": self.trial, "mode": self.mode, "cluster": asdict(self.cluster),
            "n_measured": self.n_measured, "rows": [_data(row) for row in self.rows],
            "others": [{"trial": n, **_data(row)} for n, row in self.others],
            "notes": list(self.notes),
            "device": self.device,
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """The forecasts for people."""
        from autotune.report.tables import aligned

        cluster = self.cluster
        whose = f", trial {self.trial}" if self.trial is not None else ""
        yield f"{self.study}{whose}: {self.rows[-1].candidate.describe()}, on devices like this one: {self.device}"
        nodes = f"{cluster.devices} devices, {min(cluster.per_node, cluster.devices)} a node"
        kept = "every device does what it did" if self.mode == "weak" else "the global batch stays"
        yield f"{nodes}; {self.mode} scaling: {kept}; intervals hold 90 %"
        yield ""
        yield from aligned(_cells(self.rows, "devices", [str(row.world_size) for row in self.rows]))
        if self.others:
            yield ""
            yield f"The front's other configurations on {cluster.devices} devices, by throughput:"
            rows = [row for _, row in self.others]
            table = list(aligned(_cells(rows, "trial", [str(n) for n, _ in self.others])))
            yield from table[: -len(rows)]
            for row, line in zip(rows, table[-len(rows) :], strict=True):
                yield line
                yield f"       {row.candidate.describe()}"
        yield ""
        yield from (f"note: {note}" for note in self.notes)


def project(
    study: Annotated[
        str | None, typer.Argument(metavar="STUDY", help="Name of a study (default: the only one).")
    ] = None,
    devices: Annotated[int, option("N", "Devices of the cluster, one rank each.")] = 8,
    per_node: Annotated[int, option("N", "Devices of a node.")] = 8,
    intra_bandwidth: Annotated[
        str | None, option("300GB/s", "What a collective reaches within a node (default: as measured here).")
    ] = None,
    inter_bandwidth: Annotated[str | None, option("400Gbit/s", "Of a node to the others, each way.")] = None,
    intra_latency: Annotated[str | None, option("5us", "Of a message within a node.")] = None,
    inter_latency: Annotated[str | None, option("20us", "Of a message between nodes.")] = None,
    algorithm: Annotated[str, option("NAME", "Of collectives: auto, ring, tree or hierarchical.")] = "auto",
    *,
    strong: Annotated[
        bool, typer.Option("--strong/--weak", help="Keep the global batch, or let it grow with the devices.")
    ] = False,
    pick: Annotated[str | None, option("NAME", "Which pick of the study (default: recommended).")] = None,
    trial: Annotated[int | None, option("N", "This trial of its front instead of a pick.")] = None,
    knobs: Annotated[list[str] | None, option("KEY=VALUE", "A knob, over the pick's value.", "--set")] = None,
    device_memory: Annotated[str | None, option("80GiB", "Memory of a device there.")] = None,
    as_json: AsJson = False,
) -> int:
    """Forecast configurations on a larger cluster. Exit status: 0, or 1 where the configuration could not run there."""
    from autotune.forecast.cluster import Cluster
    from autotune.session import STUDIES

    if pick is not None and trial is not None:
        raise UserError("project: give --pick or --trial, not both")
    links = {"intra_bandwidth": intra_bandwidth, "inter_bandwidth": inter_bandwidth}
    links |= {"intra_latency": intra_latency, "inter_latency": inter_latency}
    cluster, folder = Cluster.of(devices, per_node, links, algorithm), _study_folder(study, STUDIES.absolute())
    mode: Mode = "strong" if strong else "weak"
    found = _projection(folder, cluster, pick or "recommended", trial, mode, read_settings(knobs or ()), device_memory)
    print(json.dumps(found.to_data(), indent=1) if as_json else fitted("\n".join(found.lines())))
    return 1 if found.rows[-1].impossible else 0


def _projection(
    folder: Path, cluster: Cluster, pick: str, trial: int | None, mode: Mode, settings: Mapping[str, Scalar],
    device_memory: str | None,
) -> Projection:  # fmt: skip
    """Forecasts of a study's configurations on a cluster."""
    from autotune.forecast.cluster import Projector
    from autotune.report.progress import ProgressView
    from autotune.space.candidate import Candidate
    from autotune.study.setup.capture import wanted_study
    from autotune.study.setup.forecasts import foresee_workload
    from autotune.study.spec.yaml_file import as_run

    memory = parse_size(device_memory, "--device-memory") if device_memory else None
    front, chosen = _chosen(folder, pick, trial)
    with ProgressView() as view:
        spec, _ = wanted_study(str(as_run(folder)), {}, view)
        inputs = foresee_workload(spec, view)
    predictor, n_measured = _calibrated(inputs, folder, spec.target, front)
    projector = Projector(predictor, cluster, inputs, memory)
    rows = projector.over_devices(Candidate.of({**chosen.candidate, **settings}), mode)
    others = []
    if mode == "weak" and not settings:
        left = [row for row in front if row.trial != chosen.trial]
        there = [(row.trial, projector.over_devices(Candidate.of(row.candidate), mode)[-1]) for row in left]
        others = sorted(((n, row) for n, row in there if not row.impossible), key=lambda pair: -pair[1].samples_per_s)
    return Projection(
        study=folder.name, trial=None if settings else chosen.trial, mode=mode, cluster=cluster, rows=rows,
        others=others, n_measured=n_measured, notes=list(_notes(cluster, inputs, rows[-1], n_measured)),
        device=inputs.device,
    )  # fmt: skip


def _calibrated(inputs: ForecastInputs, folder: Path, target: Path, front: Sequence[Row]) -> tuple[Predictor, int]:
    """The study's predictor, corrected by its trials and by `autotune scale`, else by its front; and by how many."""
    from autotune.forecast.predictor import Predictor
    from autotune.space.candidate import Candidate
    from autotune.study.setup.forecasts import measured_in

    predictor = Predictor(inputs.profile, inputs.machine, inputs.base_config)
    n = 0
    for part in (folder, folder / "scaling"):
        for ranks, trials in sorted(measured_in(part, target, inputs).items()):
            machine = replace(inputs.machine, world_size=ranks)
            for candidate, metrics in trials.items():
                predictor.learn(candidate, **metrics, machine=machine)
                n += "step_time_s" in metrics
    if not n:
        for row in front:
            peak, step = row.metrics.get("peak_memory_bytes"), row.metrics.get("step_time_s")
            predictor.learn(Candidate.of(row.candidate), peak_memory_bytes=peak, step_time_s=step)
            n += 1
    return predictor, n


def _study_folder(study: str | None, studies: Path) -> Path:
    """The folder of a study that has come to a recommendation; without a name of the only one."""
    ready = sorted(path.parent.name for path in studies.glob("*/recommended.json"))
    if study is None:
        if len(ready) != 1:
            said = f"name one of {', '.join(ready)}" if ready else "run a study first: autotune run TARGET"
            raise UserError(f"project: {len(ready)} studies in {studies} have a recommendation; {said}")
        study = ready[0]
    path = Path(study).parent if study.endswith((".yaml", ".yml")) else Path(study)
    name = path.name
    # A path may lead to a study of that name in another folder.
    if name not in ready or (len(path.parts) > 1 and path.absolute() != studies / name):
        raise UserError(
            f"project: {study}: no study with a recommendation in {studies}; known: {', '.join(ready) or 'none'}"
        )
    return studies / name


def _chosen(folder: Path, pick: str, trial: int | None) -> tuple[list[Row], Row]:
    """The front with the baseline, and the row of the configuration to forecast."""
    from autotune.scoring.recommend import pick_name

    kept, front = _read(folder / "recommended.json", Recommended), _read(folder / "front.json", list[Row])
    rows = front + (
        [kept.baseline] if kept.baseline and kept.baseline.trial not in {row.trial for row in front} else []
    )
    if trial is not None:
        found = next((row for row in rows if row.trial == trial), None)
        if found is None:
            raise UserError(
                f"project: trial {trial} is not on the front; there are {', '.join(str(row.trial) for row in rows)}"
            )
        return rows, found
    named = kept.picks | ({"baseline": kept.baseline} if kept.baseline else {})
    if pick_name(pick) not in named:
        raise UserError(f"project: --pick {pick}: {folder.name} has {', '.join(named) or 'no pick'}")
    return rows, named[pick_name(pick)]


def _read(path: Path, kind: type[T]) -> T:
    try:
        return read_record(path, kind)
    except (OSError, ValueError):
        raise UserError(f"project: {path} is not what autotune writes there; run the study again") from None


def _notes(cluster: Cluster, inputs: ForecastInputs, last: Projected, n_measured: int) -> Iterator[str]:
    from autotune.forecast.communication import NODE_LATENCY_S
    from autotune.forecast.words import SURE

    yield f"corrected by {n_measured} measurements on {inputs.world_size} rank(s) here; assumes devices as fast as here"
    if inputs.machine.accelerator == "cpu":
        yield "the study ran on a CPU, whose ranks share cores: the cluster's links and memory are forecast, not its devices"
    if cluster.devices > cluster.per_node and cluster.inter_latency_s is None:
        yield f"latency between nodes is taken as {NODE_LATENCY_S * 1e6:.0f} us; --inter-latency says otherwise"
    if cluster.intra_bytes_per_s is None and cluster.per_node > 1:
        yield "the link within a node is taken to be the one measured here; --intra-bandwidth says otherwise"
    if last.impossible:
        yield f"on {last.world_size} devices it cannot run: {last.impossible}"
    if last.fits is not None and last.fits < SURE:
        yield f"it fits a device there with a probability of {last.fits:.0%}: --device-memory says what one has"
    yield "waiting for stragglers, congestion and failures is not in it"


def _cells(rows: Sequence[Projected], first: str, names: Sequence[str]) -> list[list[str]]:
    """The rows of a table, its header first."""
    from autotune.forecast.words import SURE
    from autotune.report.data import metric_scale

    times = metric_scale("step_time_s", [end for row in rows for end in (row.step_time_s.low, row.step_time_s.high)])
    sizes = metric_scale("peak_memory_bytes", [row.peak_memory_bytes.value for row in rows])
    # Without the interval of the efficiency, which follows from that of the step time: a terminal has 80 columns.
    header = f"{first}|global\nbatch|step\ntime\n({times.unit})|interval|samples/s|communi-\ncation"
    header += f"|memory\n({sizes.unit})|fits|effi-\nciency"
    found = [header.split("|")]
    for name, row in zip(names, rows, strict=True):
        fits = "-" if row.fits is None else "yes" if row.fits >= SURE else "maybe" if row.fits > 1 - SURE else "no"
        found.append([
            name, f"{row.samples_per_step:,}", times.number(row.step_time_s.value),
            times.interval(row.step_time_s.low, row.step_time_s.high), format_quantity(row.samples_per_s, ""),
            f"{row.communication:.0%}", sizes.number(row.peak_memory_bytes.value), fits,
            f"{row.efficiency:.0%}",
        ])  # fmt: skip
    return found


def _data(row: Projected) -> dict[str, Any]:
    return {**asdict(row), "candidate": row.candidate.values(), "words": row.candidate.describe()}
