"""The project that a study belongs to: a folder of studies, told apart where several share one database."""

import contextlib
import fcntl
import os
import platform
import uuid
from pathlib import Path

from optuna.study import Study

from autotune.study.storage.database import StoreError
from autotune.study.storage.optuna_tables import set_study_attr, study_attr
from autotune.system import files

FILE = ".project"
ATTR = "autotune:project"


def key_of(studies: Path) -> str:
    """The key of a folder of studies, which the folder keeps; a new one if it has none."""
    if not kept_key(studies):
        studies.mkdir(parents=True, exist_ok=True)
        folder = os.open(studies, os.O_RDONLY | os.O_CLOEXEC)
        try:  # of two runs that begin at once the second takes the first one's key, or one's study would be a stranger's
            with contextlib.suppress(OSError):  # not every file system locks
                fcntl.flock(folder, fcntl.LOCK_EX)
            if not kept_key(studies):
                files.write_text(studies / FILE, f"{uuid.uuid4().hex}\n")
        finally:
            os.close(folder)
    return kept_key(studies)


def kept_key(studies: Path) -> str:
    """The key that a folder of studies keeps; empty without one that can be read."""
    with contextlib.suppress(OSError, ValueError):
        return uuid.UUID(files.read_regular(studies / FILE).decode().strip()).hex
    return ""


def mark(study: Study, studies: Path) -> None:
    """Note in the database whose study it is."""
    owner = {"key": key_of(studies), "folder": f"{studies.absolute()} on {platform.node()}"}
    set_study_attr(study, ATTR, owner)


def is_own(study: Study, studies: Path) -> bool:
    """Whether a study belongs to a folder of studies; one without an owner belongs to everybody."""
    return not (owner := _owner(study)) or owner.get("key") == kept_key(studies)


def check_own(study: Study, studies: Path) -> None:
    """Refuse a study of another project."""
    if not is_own(study, studies):
        owner = _owner(study)
        raise StoreError(
            f"study {study.study_name!r} in this database belongs to another project, {owner.get('folder')}: choose"
            f" another --study name. If that folder is this one, moved, write {owner.get('key')} to {studies / FILE}"
        )


def _owner(study: Study) -> dict[str, str]:
    found = study_attr(study, ATTR)
    return found if isinstance(found, dict) else {}
