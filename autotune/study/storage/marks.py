"""The mark of a study whose trials are being told anew from its folder."""

from __future__ import annotations

from optuna.study import Study

from autotune.study.storage.optuna_tables import storage_of, study_id

RESTORING_ATTR = "autotune:restoring"


def note_restoring(study: Study, *, restoring: bool) -> None:
    """Store whether results of the study's folder are still to be told to a new database."""
    storage_of(study).set_study_system_attr(study_id(study), RESTORING_ATTR, restoring)


def is_restoring(study: Study) -> bool:
    """Whether a run has begun to tell the results of the study's folder to a new database, and has not ended it."""
    return bool(storage_of(study).get_study_system_attrs(study_id(study)).get(RESTORING_ATTR))
