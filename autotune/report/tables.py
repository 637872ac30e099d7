"""The tables of a study: rows of trials, and one trial's metrics beside the baseline's, in values and in words."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.report.data import Data, StudyReport, interval, measured, metric_scale, times, words
from autotune.report.gains import Change, change
from autotune.scoring.metrics import METRICS
from autotune.system.units import Scale


@dataclass(frozen=True, kw_only=True)
class Row:
    """A trial in a table.

    Attributes:
        marks: What it stands for: titles of picks, `baseline`.
        speedup: Throughput over the baseline's; None if unknown.
        values: By metric; what was not measured is missing.
        cells: The same in words, in the table's units.
    """

    trial: int
    configuration: str
    marks: Sequence[str]
    speedup: float | None
    values: dict[str, float]
    cells: dict[str, str]

    def line(self, scales: dict[str, Scale], missing: str) -> list[str]:
        """The numbers as text, below `heads`."""
        return [str(self.trial), *(self.cells.get(name, missing) for name in scales), times(self.speedup) or missing]


def heads(scales: dict[str, Scale], form: str = "{label} ({unit})") -> list[str]:
    """The heads of the numbers of a row: trial, metrics, speed-up."""
    metrics = (form.format(label=METRICS[name].label, unit=scale.unit) for name, scale in scales.items())
    return ["trial", *metrics, "speed-up"]


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> Iterator[str]:
    """Rows of cells as lines, every column to the right but those whose numbers are in `left`; heads may have line breaks."""
    heads = [cell.split("\n") for cell in rows[0]]
    deepest = max(map(len, heads))
    above = zip(*([""] * (deepest - len(head)) + head for head in heads), strict=True)
    table = [*above, *rows[1:]]
    width = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (f"{cell:{'<' if n in left else '>'}{width[n]}}" for n, cell in enumerate(row))
        yield "  ".join(cells).rstrip()


def scales_of(points: Sequence[Data], names: Sequence[str]) -> dict[str, Scale]:
    """The unit and the decimals of each metric, common to all points."""
    values = [measured(point) for point in points]
    return {name: metric_scale(name, [found[name] for found in values if name in found]) for name in names}


def row(report: StudyReport, point: Data, scales: dict[str, Scale]) -> Row:
    """A point as a row of a table with these scales."""
    values = {name: value for name, value in measured(point).items() if name in scales}
    return Row(
        trial=point["trial"],
        configuration=words(point["candidate"]),
        marks=report.mark(point["trial"]),
        speedup=point.get("speedup"),
        values=values,
        cells={name: scales[name].number(value) for name, value in values.items()},
    )


def overview(report: StudyReport) -> tuple[dict[str, Scale], list[Row]]:
    """The objectives of the front, the picks and the baseline: scales by metric, and rows."""
    points = report.table()
    scales = scales_of(points, report.objectives)
    return scales, [row(report, point, scales) for point in points]


def listed(report: StudyReport) -> tuple[list[str], list[list[str]]]:
    """The overview as cells, its heads and its rows: trial, configuration, metrics, speed-up, marks."""
    scales, rows = overview(report)
    trial, *numbers = heads(scales)
    lines = (row.line(scales, "") for row in rows)
    return [trial, "configuration", *numbers, ""], [
        [line[0], row.configuration, *line[1:], ", ".join(row.marks)] for line, row in zip(lines, rows, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A metric of a trial beside the baseline's.

    Attributes:
        scale: Unit and decimals of both values.
        ends: Its 95 % interval; None where it has none that can be seen.
        reference: The baseline's value; None without one to compare with.
        reference_ends: Its 95 % interval.
        change: The trial's value against the baseline's.
    """

    label: str
    scale: Scale
    value: float
    ends: tuple[float, float] | None
    reference: float | None
    reference_ends: tuple[float, float] | None
    change: Change | None


def compared(report: StudyReport, point: Data, names: Sequence[str]) -> list[Compared]:
    """The metrics that a point yielded, beside the baseline's, unless it is the baseline."""
    base = None if report.is_baseline(point) else report.baseline
    own, reference = measured(point), measured(base) if base else {}
    found = []
    for name in [name for name in names if name in own]:
        other = reference.get(name)
        scale = metric_scale(name, [own[name], *([] if other is None else [other])])
        found.append(
            Compared(
                label=METRICS[name].label,
                scale=scale,
                value=own[name],
                ends=_visible(interval(point, name, own[name]), scale),
                reference=other,
                reference_ends=None if other is None or base is None else _visible(interval(base, name, other), scale),
                change=change(point, name) if other is not None else None,
            )
        )
    return found


def _visible(ends: tuple[float, float], scale: Scale) -> tuple[float, float] | None:
    return ends if scale.number(ends[0]) != scale.number(ends[1]) else None


def records(report: StudyReport) -> tuple[list[str], list[dict[str, Any]]]:
    """The trials as columns and records for programs; in a record what is missing is None or left out."""
    names = report.metric_names()
    knobs = list(dict.fromkeys(knob for trial in report.trials for knob in trial["candidate"]))
    columns = ["trial", "role", "outcome", "reason", "phase", "feasible", "marks", "configuration"]
    columns += ["speedup", "speedup_low", "speedup_high", "measurements", "wall_s"]
    columns += [column for name in names for column in (name, f"{name}_low", f"{name}_high")]
    columns += [f"candidate.{knob}" for knob in knobs]
    found = []
    for trial in report.trials:
        record = {
            name: trial.get(name) for name in ("trial", "role", "outcome", "reason", "phase", "feasible", "wall_s")
        }
        record |= {"marks": "; ".join(report.mark(trial["trial"])), "configuration": words(trial["candidate"])}
        record["speedup"] = trial.get("speedup")
        record["speedup_low"], record["speedup_high"] = trial.get("speedup_ci95") or (None, None)
        record["measurements"] = trial.get("measurements") if measured(trial) else None
        for name, value in measured(trial).items():
            if name in names:
                low, high = interval(trial, name, value)
                record |= {name: value, f"{name}_low": low, f"{name}_high": high}
        found.append(record | {f"candidate.{knob}": trial["candidate"].get(knob) for knob in knobs})
    return columns, found
