"""The mark of a study that a run takes up from its folder, in case that the run is killed meanwhile."""

from __future__ import annotations

from optuna.study import Study

from autotune.study.storage.optuna_tables import storage_of, study_id

ATTR = "autotune:restoring"


def mark(study: Study, *, under_way: bool) -> None:
    """Note whether results of the study's folder are still to be told to a new database."""
    storage_of(study).set_study_system_attr(study_id(study), ATTR, under_way)


def is_under_way(study: Study) -> bool:
    """Whether a run has begun to tell the results of the study's folder to a new database, and has not ended it."""
    return bool(storage_of(study).get_study_system_attrs(study_id(study)).get(ATTR))
