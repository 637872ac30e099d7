"""The files of `autotune report`: the page, the same as JSON and CSV for programs, the figures as PNG."""

import contextlib
import csv
import io
from collections.abc import Iterator
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from autotune.report import figures, fronts, pictures, readme, series, tables
from autotune.report.data import StudyReport
from autotune.system import files
from autotune.system.provenance import provenance
from autotune.trial.folder import write_record

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def write_report(report: StudyReport, where: Path, *, single_file: bool = False) -> list[Path]:
    """Writes the page, and unless only that is wanted `report.json` and `trials.csv` beside it.

    Args:
        where: A folder, or the page alone, as `out.html`.

    Returns:
        Their paths, the page first.
    """
    from autotune.report.page import render  # Jinja2 and plotly's figures, which most commands do not need

    is_page = where.suffix.lower() in (".html", ".htm") and not where.is_dir()
    folder, page = (where.parent, where) if is_page else (where, where / "report.html")
    folder.mkdir(parents=True, exist_ok=True)
    render.write(report, page)
    if single_file or is_page:
        return [page]
    write_record(folder / "report.json", as_data(report), sync=False)
    files.write_text(folder / "trials.csv", as_csv(report), sync=False)
    return [page, folder / "report.json", folder / "trials.csv"]


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
    columns, found = tables.records(report)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in record.items()} for record in found)
    return text.getvalue()


def _cell(value: Any) -> Any:
    """A value for a spreadsheet: a text that it would take for a formula begins with an apostrophe."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_STARTS) else value


def draw(report: StudyReport, folder: Path) -> list[Path]:
    """Writes the study's figures as PNG."""
    metrics = report.objectives
    timed = [curve.trial for curve in series.steps(report)]
    marked = [trial for trial in timed if trial in report.marks][:4]
    drawn = {f"front-{x}-{y}": fronts.front(report, x, y) for x, y in combinations(metrics, 2)}
    drawn |= {
        "parallel": fronts.parallel(report, metrics[0]) if metrics and len(report.compared) > 1 else {},
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


def _withdraw(folder: Path) -> None:
    """Removes the configuration of an answer that does not stand any more, if it is the one that was written with it."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        last = files.json_of(files.read_regular(folder / "recommended.json"))["picks"]["recommended"]
        if files.json_of(files.read_regular(folder / "ds_config.json")) == last["ds_config"]:
            (folder / "ds_config.json").unlink()


def write_answer(report: StudyReport, folder: Path) -> Iterator[Path]:
    """Writes the study's files, each whole or not at all, the largest last; removes what an earlier answer left.

    Yields:
        The path of each file once it is written, the one that people want first.
    """
    from autotune.report.page import render

    recommended = report.picks.get("recommended")
    if recommended is None:
        _withdraw(folder)
    records = {
        "ds_config.json": recommended["ds_config"] if recommended else None,
        "recommended.json": report.recommended,
        "front.json": report.front,
        "environment.json": {**report.environment, **provenance(folder)} if report.environment else {},
    }
    for name, data in records.items():
        if data is not None:
            write_record(folder / name, data)
            yield folder / name
    files.write_text(folder / "README.md", readme.render(report))
    yield folder / "README.md"
    render.write(report, folder / "report.html")
    yield folder / "report.html"
