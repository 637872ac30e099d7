"""Builds the notes that optuna-dashboard shows, the answer and each trial's result; `storage.notes` stores them."""

from __future__ import annotations

import re

from optuna.study import Study

from autotune.report import readme
from autotune.report.data import StudyReport
from autotune.study.storage import notes

LONGEST_TRIAL_NOTE_CHARS = 2000


def store_notes(study: Study, report: StudyReport) -> None:
    """Store the notes of a study and its trials."""
    answer = _without_links(readme.study_note(report, lambda _: ""))
    trials = {row["trial"]: _without_links(readme.trial_note(report, row, "")) for row in report.trials}
    notes.write_notes(study, answer, {number: text[:LONGEST_TRIAL_NOTE_CHARS] for number, text in trials.items()})


def _without_links(text: str) -> str:
    """The note without links to `autotune dashboard`, which does not serve these pages."""
    text = text.replace("\n\n[Download its ds_config.json]()", "").replace("download the JSON", "pick")
    return re.sub(r"\[([^\]]*)\]\(\)", r"\1", text)
