"""What a run is asked to do, and its engine, which gets ready while the driver imports the rest."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.executors.base import Executor
from autotune.study.events import SILENT, EventSink
from autotune.study.folder import RECORD_FILE
from autotune.study.lock import study_lock
from autotune.study.setup.capture import wanted_study
from autotune.study.setup.engine import executor_for
from autotune.study.spec.spec import StudySpec
from autotune.system.files import shown
from autotune.system.signals import terminable
from autotune.trial.target import is_yaml


@dataclass(frozen=True, kw_only=True)
class StudyRequest:
    """A study that is to run, and is locked.

    Attributes:
        target: What the user named: a `model.py`, a training script, a `study.yaml`, or a launch command.
        overrides: Fields of `StudySpec` that replace those of the file; None leaves a field as it is.
        executor: Its engine, which need not be ready yet.
    """

    spec: StudySpec
    target: Path
    overrides: Mapping[str, Any]
    folder: Path
    executor: Executor
    notes: Sequence[str] = ()


def studies_folder(target: Path) -> Path:
    """Returns the folder of all studies: `studies` around the study's file, else in the working directory."""
    around = target.absolute().parent.parent
    # A launch command may end in the name of such a file.
    states_one = around.name == "studies" and is_yaml(target) and os.path.isfile(target)
    return around if states_one else Path("studies").absolute()


def _check_not_renamed(target: Path, folder: Path) -> None:
    """Refuses the file of a study's folder that was renamed or copied: the run would begin another folder, without what this one holds."""
    around = target.absolute().parent
    if not is_yaml(target) or around.parent != folder.parent or around.resolve() == folder.resolve():
        return
    if (around / RECORD_FILE).is_file():
        raise UserError(
            f"{shown(target)} states study {folder.name!r}, whose folder is {shown(folder)}: this one was renamed or copied. Name it"
            f" {folder.name!r} again, or take its trials up under its own name with --study {around.name}"
        )


@contextlib.contextmanager
def requested(target: str, overrides: Mapping[str, Any], view: EventSink = SILENT) -> Iterator[StudyRequest]:
    """Reads and locks a study, and begins to start its engine; closes the engine in the end.

    To import what `tune` needs takes as long as a third of what a server on this machine imports, so the two go on at once.

    Raises:
        UserError: The target cannot be tuned, or another process runs this study.
        KeyboardInterrupt: The user stopped a launch command.
    """
    spec, notes = wanted_study(target, overrides, view)
    folder = studies_folder(Path(target)) / spec.name
    _check_not_renamed(Path(target), folder)
    with terminable(), study_lock(folder), executor_for(spec, folder, wait=False) as executor:
        yield StudyRequest(
            spec=spec, target=Path(target), overrides=overrides, folder=folder, executor=executor, notes=notes,
        )  # fmt: skip
