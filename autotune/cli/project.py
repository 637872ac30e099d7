"""`autotune project`: forecasts of a study's configurations on a larger cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.cli.predict import read_settings
from autotune.errors import UserError
from autotune.forecast.cluster import NODE_LATENCY_S, Cluster, Projected, Projector
from autotune.forecast.predictor import ForecastInputs, Predictor, settings_of
from autotune.report.data import metric_scale
from autotune.report.progress import ProgressView
from autotune.scoring.scaling import Mode
from autotune.session import STUDIES
from autotune.space.candidate import Candidate
from autotune.space.deepspeed import Scalar
from autotune.study.setup.forecasts import SURE, foresee_workload, measured_in
from autotune.study.spec.spec import StudySpec
from autotune.system.units import parse_bytes


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


def question(
    pick: str, trial: int | None, settings: Sequence[str], device_memory: str | None, *, strong: bool
) -> Question:
    """The question that the options of `autotune project` ask.

    Args:
        pick: Which pick of the study.
        trial: This trial of its front instead.
        settings: KEY=VALUE texts.
        device_memory: Memory of a device there, as `80GiB`.
        strong: Keep the global batch.

    Raises:
        UserError: An option cannot be read.
    """
    try:
        memory = float(parse_bytes(device_memory)) if device_memory else None
    except ValueError as error:
        raise UserError(f"--device-memory: {error}") from None
    return Question(
        pick=pick, trial=trial, settings=read_settings(settings), mode="strong" if strong else "weak", device_memory_bytes=memory
    )  # fmt: skip


def project_study(folder: Path, cluster: Cluster, question: Question) -> Projection:
    """What a study's configurations would take on a cluster.

    Args:
        folder: The study's.
        cluster: Where to.
        question: The configuration, and how its batch scales.

    Raises:
        UserError: The study has no such configuration, or it cannot be carried there.
    """
    front, chosen = _chosen(folder, question.pick, question.trial)
    spec = StudySpec.of(folder / "study.yaml", {})
    base = Candidate.of({**chosen["candidate"], **question.settings})
    with ProgressView() as view:
        foreseen = foresee_workload(spec, view)
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
    foreseen: ForecastInputs, folder: Path, target: Path, front: Sequence[Mapping[str, Any]]
) -> tuple[Predictor, int]:
    """The study's predictor, corrected by its trials and the runs of `autotune scale`, else by its front."""
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


def _notes(cluster: Cluster, foreseen: ForecastInputs, rows: Sequence[Projected], n_measured: int) -> Iterator[str]:
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
    times = metric_scale("step_time_s", [end for row in rows for end in (row.step_time_s.low, row.step_time_s.high)])
    sizes = metric_scale("peak_memory_bytes", [row.peak_memory_bytes.value for row in rows])
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


def project(study: str | None, cluster: Cluster, question: Question, *, as_json: bool) -> int:
    """`autotune project`: a study's configurations on a larger cluster.

    Returns:
        Exit status: 0, or 1 where the configuration could not run there.
    """
    found = project_study(study_folder(study, STUDIES.absolute()), cluster, question)
    print(json.dumps(found.to_data(), indent=1) if as_json else "\n".join(found.lines()))
    return 1 if found.rows[-1].impossible else 0
