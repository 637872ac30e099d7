"""Notes of a study and its trials, stored where optuna-dashboard shows them; what the user edited there stays."""

import hashlib
from collections.abc import Mapping
from typing import Any

from optuna.study import Study

from autotune.study.storage.optuna_tables import note_attrs, note_of, storage_of, study_id, trial_id

NOTES_ATTR = "autotune:notes"  # digests of the notes that autotune wrote, by `Note.key`


def write_notes(study: Study, note: str, trial_notes: Mapping[int, str]) -> None:
    """Store notes where optuna-dashboard shows them. A note that the user has edited there stays."""
    storage, own = storage_of(study), study_id(study)
    attrs = storage.get_study_system_attrs(own)
    ids = {trial.number: trial_id(trial) for trial in study.get_trials(deepcopy=False)}
    texts: dict[int | None, str] = {None: note} | {ids[n]: text for n, text in trial_notes.items() if n in ids}
    written: dict[str, str] = dict(attrs.get(NOTES_ATTR, {}))
    fresh: dict[str, Any] = {}
    for trial, text in texts.items():
        before = note_of(attrs, trial)
        if before.text == text or (before.text and written.get(before.key) != _digest(before.text)):
            continue
        written[before.key] = _digest(text)
        fresh |= note_attrs(text, before)
    for key, value in (fresh | {NOTES_ATTR: written}).items() if fresh else ():
        storage.set_study_system_attr(own, key, value)


def without_written_notes(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """A study's system attributes without the notes that `write_notes` wrote and the user has not edited."""
    written = dict(attrs.get(NOTES_ATTR, {}))
    ours = [key for key, digest in written.items() if _digest(note_of(attrs, key).text) == digest]
    keys = tuple(key + end for key in ours for end in ("note_ver", "note_str:"))
    return {name: value for name, value in attrs.items() if not name.startswith(keys)} if keys else dict(attrs)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
