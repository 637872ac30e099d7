"""Optuna's storage as its dashboard sees it: the database read-only, with the overlay of each of our studies.

Looking at a study writes nothing into its database; only notes that a reader edits are kept there, in place of ours.
"""

import copy
import io
import threading
import time
import uuid
from collections.abc import Callable, Container, ItemsView, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from optuna.artifacts.exceptions import ArtifactNotFound
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState

from autotune.errors import UserError
from autotune.report import load
from autotune.report.dashboard.overlay import (
    ARTIFACT_PREFIX,
    EDITABLE,
    StudyOverlay,
    artifact_attrs,
    overlay,
    under_way,
)
from autotune.report.data import StudyReport
from autotune.space.candidate import CANDIDATE_ATTR
from autotune.study.storage import notes, records
from autotune.study.storage.database import Storage
from autotune.study.storage.leases import TOLD_BY_ATTR

# Attributes of our studies and trials that are for programs.
OWN_ATTRS = frozenset({CANDIDATE_ATTR, TOLD_BY_ATTR, "reason", "outcome"})
# A study is read again after this long, or after this multiple of the reading time if that is longer, so that a large
# study does not keep the server busy.
REFRESH_S, REFRESH_SHARE = 10.0, 20.0
# An older copy is not shown any more.
LONGEST_STALE_S = 600.0
READ_ONLY = "this dashboard shows what autotune measured and changes nothing but notes"
NOTE_VERSION = "dashboard:note_ver"


class _CachedOverlay:
    """The overlay of one study, renewed in the background.

    The first reader waits for it. Later readers get the last copy while one thread makes the next.

    Args:
        make: Reads the study and returns its overlay, or None if it is not one of ours.
        leave: Called at the end of each thread.
    """

    def __init__(self, make: Callable[[], StudyOverlay | None], leave: Callable[[], None]) -> None:
        self._make, self._leave = make, leave
        self.last: StudyOverlay | None = None
        self._until = 0.0
        self._error: Exception | None = None
        self._making = threading.Lock()

    def look(self) -> StudyOverlay | None:
        """Returns the overlay to show; None while there is none.

        Raises:
            Exception: The overlay could not be made, by this call or by the thread that renews it.
        """
        last, now = self.last, time.monotonic()
        if last is None or now > self._until + LONGEST_STALE_S:
            with self._making:
                return self._renewed()
        if now >= self._until and not self._making.locked():
            # A daemon, since the server's end does not wait for it.
            threading.Thread(target=self._renew, name="autotune-overlay", daemon=True).start()
        return last

    def _renew(self) -> None:
        with self._making:
            try:
                self._renewed()
            except Exception as error:
                # The next reader gets the error, and the one after that waits for a new copy.
                self.last, self._error = None, error
        self._leave()

    def _renewed(self) -> StudyOverlay | None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        start = time.monotonic()
        if self.last is None or start >= self._until:  # no other thread has renewed it meanwhile
            self.last = self._make()
            now = time.monotonic()
            self._until = now + max(REFRESH_S, REFRESH_SHARE * (now - start))
        return self.last


class _Attrs(Mapping[str, Any]):
    """A study's attributes, with the overlay read only on access: the list of studies does not need it."""

    def __init__(self, own: Mapping[str, Any], whole: Callable[[], Mapping[str, Any]]) -> None:
        self._own, self._make = own, whole

    @cached_property
    def _whole(self) -> Mapping[str, Any]:
        return self._make()

    def __getitem__(self, key: str) -> Any:
        return (self._whole if key.startswith((EDITABLE, ARTIFACT_PREFIX)) else self._own)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)

    def items(self) -> ItemsView[str, Any]:
        """The items; optuna-dashboard asks for them once for each trial."""
        return self._whole.items()


class DashboardStorage(BaseStorage):
    """Optuna's storage as its dashboard sees it, and the store of the files that it offers."""

    def __init__(self, storage: Storage, folder_of: Callable[[str], Path]) -> None:
        self._base, self._folder_of = storage, folder_of
        self._kept: dict[tuple[int, str], _CachedOverlay] = {}
        self._owners: dict[int, int] = {}  # study by trial, for all trials that were listed
        # Random, so that a foreign page cannot guess the id of a log.
        self._namespace = uuid.uuid4()

    def shown(self, study_id: int) -> StudyOverlay | None:
        """The overlay of a study; None if there is none, autotune did not make it or it has no trial yet."""
        try:
            name = self._base.get_study_name_from_id(study_id)
        except KeyError:
            return None
        kept = self._kept.get((study_id, name))
        if kept is None:
            made = _CachedOverlay(partial(self._read, study_id, name), self.remove_session)
            kept = self._kept.setdefault((study_id, name), made)
        return kept.look()

    def report(self, name: str) -> StudyReport:
        """The own report of a study that is shown, with every series."""
        return load.from_storage(self._base, name, self._folder_of(name), today=False)

    def _read(self, study_id: int, name: str) -> StudyOverlay | None:
        try:
            study = records.load_study(self._base, name)
            folder = self._folder_of(name)
            report = load.read(study, folder, series=False)
        except UserError:
            return None
        return overlay(report, study_id, folder, self._namespace, under_way(study, report, folder))

    # Studies

    def get_all_studies(self) -> list[FrozenStudy]:
        """Every study, ours without the attributes for programs."""
        every = sorted(self._base.get_all_studies(), key=lambda found: found._study_id)
        for found in every:
            found.user_attrs = _readable(found.user_attrs)
            own = found.system_attrs
            found.system_attrs = _Attrs(own, partial(self._attrs, found._study_id, own))  # type: ignore[assignment]
        return every

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        """The study's attributes with our note, figures and files."""
        return self._attrs(study_id, self._base.get_study_system_attrs(study_id))

    def _attrs(self, study_id: int, own: Mapping[str, Any]) -> dict[str, Any]:
        shown = self.shown(study_id)
        if shown is None:
            return dict(own)
        own = notes.without_written_notes(own)  # what is laid over is newer
        # A note that a reader edited replaces ours.
        note = {} if NOTE_VERSION in own else shown.note
        return {**own, **shown.system_attrs, **note}

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        """The study's attributes without those for programs."""
        return _readable(self._base.get_study_user_attrs(study_id))

    def get_study_id_from_name(self, study_name: str) -> int:
        """As in the database."""
        return self._base.get_study_id_from_name(study_name)

    def get_study_name_from_id(self, study_id: int) -> str:
        """As in the database."""
        return self._base.get_study_name_from_id(study_id)

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        """As in the database."""
        return self._base.get_study_directions(study_id)

    # Trials

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """The trials, each with its configuration, mark, failure and metrics as attributes."""
        shown = self.shown(study_id)
        trials = self._base.get_all_trials(study_id, deepcopy=False, states=states)
        self._owners.update((trial._trial_id, study_id) for trial in trials)
        found = [self._trial(trial, shown) for trial in trials]
        found = found if states is None else [trial for trial in found if trial.state in states]
        return copy.deepcopy(found) if deepcopy else found

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """The trial, as in `get_all_trials`."""
        study_id = self._owners.get(trial_id)
        return self._trial(self._base.get_trial(trial_id), None if study_id is None else self.shown(study_id))

    def _trial(self, found: FrozenTrial, shown: StudyOverlay | None) -> FrozenTrial:
        if not {CANDIDATE_ATTR, TOLD_BY_ATTR} & found.user_attrs.keys():  # made by another program
            return found
        trial = copy.copy(found)
        extra = shown.trial_attrs.get(found.number, {}) if shown else {}
        # Those of ours are newer than the attributes from the trial's end.
        trial.user_attrs = {**_readable(found.user_attrs), **extra}
        if shown and found.state is TrialState.COMPLETE and found.number in shown.trial_values:
            # Optuna takes its best trials from these: the ones on our front, by all measurements and not by the first.
            values = shown.trial_values[found.number]
            trial.state, trial.values = (TrialState.COMPLETE, values) if values else (TrialState.PRUNED, None)
        if shown:
            files = {artifact: shown.files[artifact] for artifact in shown.trial_files.get(found.number, ())}
            trial._system_attrs = {**found._system_attrs, **artifact_attrs(files)}
        return trial

    # Files: the three methods of Optuna's ArtifactStore

    def open_reader(self, artifact_id: str) -> BinaryIO:
        """The content of a file that was listed before; ids are no paths."""
        for shown in [kept.last for kept in list(self._kept.values())]:
            content = shown.files[artifact_id].read() if shown and artifact_id in shown.files else None
            if content is not None:
                return io.BytesIO(content)
        raise ArtifactNotFound("no such file")

    # Writing

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        """Keeps an edited note; refuses everything else."""
        if not key.startswith(EDITABLE):
            self._refuse()
        self._base.set_study_system_attr(study_id, key, value)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UserError(READ_ONLY)

    create_new_study = delete_study = set_study_user_attr = create_new_trial = _refuse
    set_trial_param = set_trial_state_values = set_trial_intermediate_value = _refuse
    set_trial_user_attr = set_trial_system_attr = write = remove = _refuse

    def remove_session(self) -> None:
        """Ends this thread's connection."""
        self._base.remove_session()


def _readable(attrs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attrs.items() if name not in OWN_ATTRS}
