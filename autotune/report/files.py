"""The files of `autotune report`: the page, the same as JSON and CSV for programs, the figures as PNG."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from autotune.report import figures, fronts, pictures, readme, series
from autotune.report.data import StudyReport, interval, measured, speedup, words
from autotune.report.page import render
from autotune.system import files
from autotune.trial.folder import write_record


def write_report(report: StudyReport, folder: Path, *, single_file: bool) -> list[Path]:
    """Writes the page, and unless only that is wanted `report.json` and `trials.csv` beside it.

    Returns:
        Their paths, the page first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    render.write(report, folder / "report.html")
    if single_file:
        return [folder / "report.html"]
    write_record(folder / "report.json", as_data(report), sync=False)
    files.write_text(folder / "trials.csv", as_csv(report), sync=False)
    return [folder / name for name in ("report.html", "report.json", "trials.csv")]


def as_data(report: StudyReport) -> dict[str, Any]:
    """Everything that the page shows, for programs."""
    return {
        "study": dict(report.study),
        "environment": dict(report.environment),
        "workload": dict(report.workload),
        "recommended": dict(report.recommended),
        "front": list(report.front),
        "caveats": report.caveats(),
        "effects": [asdict(each) for each in report.effects],
        "trials": [dict(row) for row in report.trials],
    }


def as_csv(report: StudyReport) -> str:
    """One line for each trial; `pandas.read_csv` reads numbers as numbers and what is missing as such."""
    columns, lines = rows(report)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def rows(report: StudyReport) -> tuple[list[str], list[dict[str, Any]]]:
    """The trials as a table: its columns, and a line for each trial, in which what is missing is None or left out."""
    points, marks, names = report.points(), report.marks(), report.metric_names()
    knobs = list(dict.fromkeys(knob for row in report.trials for knob in row["candidate"]))
    columns = ["trial", "role", "outcome", "reason", "phase", "feasible", "marks", "configuration", "speedup", "wall_s"]
    columns += [column for name in names for column in (name, f"{name}_low", f"{name}_high")]
    columns += [f"candidate.{knob}" for knob in knobs]
    lines = []
    for row in report.trials:
        point = points.get(row["trial"], row)
        line: dict[str, Any] = {
            column: row.get(column) for column in ("trial", "role", "outcome", "reason", "phase", "feasible", "wall_s")
        }
        line |= {"marks": "; ".join(marks.get(row["trial"], ())), "configuration": words(row["candidate"])}
        line["speedup"] = speedup(report, point) if measured(point) else None
        for name, value in measured(point).items():
            if name in names:
                line[name] = value
                line[f"{name}_low"], line[f"{name}_high"] = interval(point, name, value)
        lines.append(line | {f"candidate.{knob}": row["candidate"].get(knob) for knob in knobs})
    return columns, lines


def draw(report: StudyReport, folder: Path) -> list[Path]:
    """Writes the study's figures as PNG.

    Returns:
        Their paths.

    Raises:
        PictureError: No browser draws them here.
    """
    metrics = report.metric_names(all_metrics=False)
    timed = [curve.trial for curve in series.steps(report)]
    marked = [trial for trial in timed if trial in report.marks()][:4]
    drawn = {f"front-{x}-{y}": fronts.front(report, x, y) for x, y in combinations(metrics, 2)}
    drawn |= {
        "parallel": fronts.parallel(report, metrics[0]) if metrics and len(report.points()) > 1 else {},
        "what-mattered": figures.effects(report),
        "steps": figures.steps(report, marked or timed[:3]),
        "losses": figures.losses(report),
        "progress": figures.progress(report) if len(report.trials) > 1 else {},
    }
    drawn |= {f"forecast-{name}": figures.forecasts(report, name) for name in series.forecasts(report)}
    found = {folder / f"{name}.png": figure for name, figure in drawn.items() if figure.get("data")}
    folder.mkdir(parents=True, exist_ok=True)
    pictures.write(found)
    return list(found)


def write_answer(report: StudyReport, folder: Path) -> list[Path]:
    """Writes the study's files, each whole or not at all.

    Returns:
        Their paths, the one that people want first.
    """
    picks = report.recommended["picks"]
    write_record(folder / "environment.json", report.environment)
    write_record(folder / "front.json", report.front)
    write_record(folder / "recommended.json", report.recommended)
    files.write_text(folder / "README.md", readme.render(report))
    render.write(report, folder / "report.html")
    written = [
        folder / name for name in ("recommended.json", "front.json", "README.md", "report.html", "environment.json")
    ]
    if "recommended" in picks:
        write_record(folder / "ds_config.json", picks["recommended"]["ds_config"])
        written.insert(0, folder / "ds_config.json")
    return written
