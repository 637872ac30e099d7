"""What `autotune report` writes: the page, the same as JSON and CSV for programs, the plots as PNG."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autotune import files, trial
from autotune.report import StudyReport, browser, html, interval, measured, speedup, words

# The plots by file name, and what of the page each one is.
PLOTS = {
    "front": "#front-plot", "front-3d": "#solid-plot", "parallel": "#parallel-plot", "what-mattered": "#effects-plot",
    "steps": "#steps-plot", "losses": "#loss-plot", "progress": "#progress-plot", "forecasts": "#forecast-plot",
}  # fmt: skip
WIDTH_PX, HEIGHT_PX, SCALE = 1240, 900, 2.0


def write(report: StudyReport, folder: Path, *, single_file: bool) -> list[Path]:
    """Writes the page, and unless only that is wanted `report.json` and `trials.csv` beside it.

    Returns:
        Their paths, the page first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    html.write(report, folder / "report.html")
    if single_file:
        return [folder / "report.html"]
    trial.write(folder / "report.json", as_data(report), sync=False)
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


def draw(page: Path, folder: Path) -> list[Path]:
    """The page's plots as PNG, drawn by an installed Chromium.

    Args:
        page: The page.
        folder: Where to write them.

    Returns:
        Their paths.

    Raises:
        BrowserError: There is no browser.
    """
    with browser.browsing() as tab:
        tab.view(WIDTH_PX, HEIGHT_PX, scale=SCALE)
        tab.open(page.absolute().as_uri())
        tab.until("document.documentElement.dataset.drawn === 'yes'")
        tab.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        there: Mapping[str, bool] = tab.run(
            f"Object.fromEntries({list(PLOTS.values())}.map((each) => [each, !!document.querySelector(each)]))"
        )
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for name, selector in PLOTS.items():
            if there[selector]:
                path = folder / f"{name}.png"
                files.write_bytes(path, tab.picture(selector), sync=False)
                written.append(path)
    return written
