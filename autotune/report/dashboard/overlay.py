"""The overlay of one study: notes, figures, files and marks that the dashboard adds to the database."""

import json
import os
import stat
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna

from autotune.report import figures, fronts, readme
from autotune.report.data import Data, StudyReport, measured, words
from autotune.report.trial_notes import end_words
from autotune.scoring.metrics import METRICS
from autotune.study.folder import trial_path
from autotune.study.lock import run_under_way
from autotune.study.storage import records
from autotune.study.storage.optuna_tables import note_attrs, note_of
from autotune.system import redaction
from autotune.system.units import BYTE_UNITS, format_duration, rounded

# Where optuna-dashboard looks for the files of a study or a trial (optuna.artifacts).
ARTIFACT_PREFIX = "artifacts:"
# The attributes that a reader may change: notes, which are system attributes of the study.
EDITABLE = "dashboard:"
NO_NOTE = note_of({})
FIGURE_HEIGHT_PX = 460
LARGEST_BYTES = 256 << 20  # of a file that is served
# Every two objectives make a figure.
MOST_OBJECTIVES = 4
# Addresses on our server: a study's report by its id in the database, and the JSON of a pick by name, of a trial by number.
REPORT_LINK = "/autotune/{}/report.html"
PICK_LINK, TRIAL_LINK = "/autotune/{}/picks/{}.json", "/autotune/{}/trials/{}.json"


@dataclass(frozen=True, kw_only=True)
class File:
    """A file to download; `read` returns None if it is gone."""

    name: str
    mimetype: str
    read: Callable[[], bytes | None]


@dataclass(frozen=True, kw_only=True)
class StudyOverlay:
    """What the dashboard shows of one study beside the database.

    Attributes:
        note: Its note, under the keys of optuna-dashboard.
        system_attrs: Its figures and files, under the keys of optuna-dashboard.
        trial_attrs: By trial number: the attributes shown beside the trial.
        trial_notes: By trial number: Markdown.
        trial_values: By number of a trial that was told as complete: its objectives by all measurements, or None where it
            cannot be compared with others: a gate refused it, or it breaks a constraint.
        files: All files by id.
        trial_files: By trial number: the ids of its files.
    """

    report: StudyReport
    note: Mapping[str, Any]
    system_attrs: Mapping[str, Any]
    trial_attrs: Mapping[int, Mapping[str, Any]]
    trial_notes: Mapping[int, str]
    trial_values: Mapping[int, list[float] | None] = field(default_factory=dict)
    files: Mapping[str, File] = field(default_factory=dict)
    trial_files: Mapping[int, Sequence[str]] = field(default_factory=dict)


def overlay(report: StudyReport, study_id: int, folder: Path, namespace: uuid.UUID, left: str) -> StudyOverlay:
    """The overlay of a study.

    Args:
        namespace: The ids of files are derived from it.
        left: Progress and remaining time of a study that is under way, in words; empty if it is not.
    """
    files: dict[str, File] = {}
    trial_files: dict[int, list[str]] = {}

    def add(owner: str, file: File) -> str:
        artifact = str(uuid.uuid5(namespace, f"{study_id}/{owner}/{file.name}"))
        files[artifact] = file
        return artifact

    picks = [add("picks", config_file(f"{report.name}-{name}", pick)) for name, pick in report.picks.items()]
    for row in report.trials:
        path, found = trial_path(folder, row["trial"]), [config_file("ds_config", row)]
        found += [_log(log, folder) for log in _files(path, "rank-*.log", folder)]
        traces = _files(path, "profile/trace-rank-*.json.gz", folder)
        found += [_file(trace, folder, "application/gzip") for trace in traces]
        trial_files[row["trial"]] = [add(str(row["trial"]), file) for file in found]
    return StudyOverlay(
        report=report,
        note=_note(report, study_id, left),
        system_attrs={**_figures(report), **artifact_attrs({artifact: files[artifact] for artifact in picks})},
        trial_attrs={row["trial"]: _trial_attrs(report, row) for row in report.trials},
        trial_notes={
            row["trial"]: readme.trial_note(report, row, TRIAL_LINK.format(study_id, row["trial"]))
            for row in report.trials
        },
        trial_values={number: _values(report, number) for number in report.points},
        files=files,
        trial_files=trial_files,
    )


def _values(report: StudyReport, number: int) -> list[float] | None:
    """The objectives of a trial as every page of ours shows them."""
    found = measured(report.compared[number]) if number in report.compared else {}
    return [found[name] for name in report.objectives] if all(name in found for name in report.objectives) else None


def config_file(name: str, point: Data) -> File:
    """The complete DeepSpeed configuration of a pick or a trial as a JSON file."""

    def read() -> bytes:
        return (json.dumps(point["ds_config"], indent=2, allow_nan=False) + "\n").encode()

    return File(name=f"{name}.json", mimetype="application/json", read=read)


def _files(path: Path, pattern: str, folder: Path) -> list[Path]:
    return [each for each in sorted(path.glob(pattern)) if is_inside(each, folder)]


def artifact_attrs(files: Mapping[str, File]) -> dict[str, str]:
    """Files, by id, as optuna-dashboard lists them."""
    return {
        ARTIFACT_PREFIX + artifact: json.dumps(
            {"artifact_id": artifact, "filename": file.name, "mimetype": file.mimetype, "encoding": None}
        )
        for artifact, file in files.items()
    }


def under_way(study: optuna.Study, report: StudyReport, folder: Path) -> str:
    """The rest of the budget in words; empty if nobody runs the study."""
    n_trials = report.study["trials_wanted"]
    if n_trials is None or run_under_way(folder) is None:
        return ""
    left_s = records.ENDS_S.of(study) - time.time()
    left = format_duration(left_s) if left_s >= 1 else ""
    if not report.trials_left:
        about = f", about {left} left" if left else ""
        return f"**Under way**: the search is over, and its answer is being checked{about}."
    about = f", up to {left} left" if left else ""
    return f"**Under way**: {n_trials - report.trials_left} of {n_trials} trials{about}."


def is_inside(path: Path, folder: Path) -> bool:
    """Returns whether a path is a regular file that really lies inside a folder: no link out of it, no pipe."""
    try:
        real = path.resolve(strict=True)
        return real.is_relative_to(folder.resolve(strict=True)) and stat.S_ISREG(real.stat().st_mode)
    except (OSError, RuntimeError):  # the latter for links in a circle
        return False


def read_inside(path: Path, folder: Path) -> bytes | None:
    """The content of a file if it `is_inside` the folder and not too large, else None."""
    if not is_inside(path, folder):
        return None
    try:
        # The flags guard against an exchange of the file since the check: a link is refused, a pipe is not waited for.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(path.resolve(strict=True), flags), "rb") as file:
            found = os.fstat(file.fileno())
            return file.read(LARGEST_BYTES) if stat.S_ISREG(found.st_mode) and found.st_size <= LARGEST_BYTES else None
    except (OSError, RuntimeError):
        return None


def _file(path: Path, folder: Path, mimetype: str) -> File:
    return File(name=path.name, mimetype=mimetype, read=partial(read_inside, path, folder))


def _log(path: Path, folder: Path) -> File:
    """A rank's log without secrets; the file keeps them."""
    whole = _file(path, folder, "text/plain; charset=utf-8")

    def read() -> bytes | None:
        content = whole.read()
        return None if content is None else redaction.redact(content.decode(errors="replace")).encode()

    return replace(whole, read=read)


def _note(report: StudyReport, study_id: int, left: str) -> dict[str, Any]:
    answer = readme.study_note(report, lambda name: PICK_LINK.format(study_id, name))
    answer = f"[The report, with every figure]({REPORT_LINK.format(study_id)})\n\n{answer}"
    return note_attrs(f"{left}\n\n{answer}" if left else answer, NO_NOTE)


def _figures(report: StudyReport) -> dict[str, Any]:
    """The front over every two objectives and the timeline, each with a title, as optuna-dashboard keeps figures."""
    from optuna_dashboard import save_plotly_graph_object

    names = report.objectives if len(report.objectives) > 1 else report.metric_names()[:2]
    storage = optuna.storages.InMemoryStorage()
    study = optuna.create_study(storage=storage)
    drawn = fronts.fronts(report, names[:MOST_OBJECTIVES])
    titled = {
        f"front-{n}": (f"Front: {' against '.join(METRICS[name].label for name in pair.split('|'))}", figure)
        for n, (pair, figure) in enumerate(drawn.items(), start=1)
    }
    if report.runs:
        titled["timeline"] = ("What ran when, with re-measurements and checks", figures.timeline(report))
    for name, (heading, figure) in titled.items():
        # Below the buttons that plotly puts at the top, and clear of the legend where a narrow screen breaks that.
        title = {"text": heading, "font": {"size": 13}, "x": 0.02, "y": 1 - 34 / FIGURE_HEIGHT_PX, "yanchor": "top"}
        margin = {"l": 76, "r": 20, "t": 64, "b": 120}
        figure["layout"] |= {"title": title, "height": FIGURE_HEIGHT_PX, "margin": margin}
        drawable = SimpleNamespace(to_json=partial(json.dumps, figure))
        save_plotly_graph_object(study, drawable, graph_object_id=f"autotune-{name}")
    return storage.get_study_system_attrs(study._study_id)


def _trial_attrs(report: StudyReport, row: Data) -> dict[str, Any]:
    """The attributes shown beside a trial's parameters; numbers are rounded, since the dashboard prints all digits."""
    found: dict[str, Any] = {"configuration": words(row["candidate"])}
    if marks := report.mark(row["trial"]):
        found["mark"] = ", ".join(marks)
    end, why = end_words(row)
    if row["outcome"] != "complete" or why:
        found["failure"] = f"{end}: {why}" if why else end
    for name, value in measured(row).items():
        metric = METRICS[name]
        # One unit in every study, so that trials of two studies can be compared.
        divisor, unit = (
            BYTE_UNITS[2] if metric.unit == "B" else (1e-3, "ms") if name == "step_time_s" else (1.0, metric.unit)
        )
        found[f"{metric.label} ({unit})"] = rounded(value / divisor)
    if (n_measured := row.get("measurements") or 0) > 1:
        found["measurements"] = n_measured
    if gate := row.get("gate"):
        found["quality gate"] = {True: "no difference seen", False: "refused", None: "not decided"}[gate["passed"]]
    if measured(row) and (factor := row.get("speedup")):
        found["speed-up"] = round(factor, 3)
    return found
