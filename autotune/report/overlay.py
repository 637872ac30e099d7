"""What Optuna's dashboard is shown of a database: the storage read through, our notes, graphs, files and marks laid over.

Nothing is written. A study that runs is not slowed by whoever looks at it, a finished one is shown as it is, and a note of
the user's own stays above ours.
"""

from __future__ import annotations

import copy
import io
import json
import math
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Container, ItemsView, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NoReturn

import optuna
from optuna.artifacts.exceptions import ArtifactNotFound
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState

from autotune import UserError, masking, store
from autotune.candidate import CANDIDATE_ATTR
from autotune.claims import TOLD_BY_ATTR
from autotune.database import Storage
from autotune.lock import run_under_way
from autotune.objective import METRICS
from autotune.report import Data, StudyReport, figures, measured, readme, speedup, summary, units, words
from autotune.report.export import deepspeed_config
from autotune.trial import Outcome

# How our studies and trials are kept; for programs.
OWN_ATTRS = frozenset({store.RECORD_ATTR, store.MEASURED_ATTR, CANDIDATE_ATTR, TOLD_BY_ATTR, "reason", "outcome"})
# A study is read again after this long, or after many times what reading it took, so that a large one does not keep the server busy.
REFRESH_S, REFRESH_SHARE = 10.0, 20.0
# Meanwhile the last copy is shown, unless nobody has looked for so long that it says nothing of today.
LONGEST_STALE_S = 600.0
# Where optuna-dashboard looks for the files of a study or a trial (optuna.artifacts).
ARTIFACT_PREFIX = "artifacts:"
# What a reader may change: notes, which live in the study's system attributes.
EDITABLE = "dashboard:"
NOTE_VERSION = "dashboard:note_ver"


class ReadOnlyError(UserError):
    """The dashboard shows studies; it does not change them."""


@dataclass(frozen=True, kw_only=True)
class File:
    """Something to download.

    Attributes:
        name: Its file name.
        mimetype: What it is.
        read: Its content, or None if it is gone.
    """

    name: str
    mimetype: str
    read: Callable[[], bytes | None]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What is laid over one study.

    Attributes:
        report: The study.
        note: Its note, under the keys that optuna-dashboard reads it from.
        system_attrs: Its graphs and files, in the same way.
        trial_attrs: By trial number: what stands beside the trial.
        trial_notes: By trial number.
        files: Everything to download by id.
        trial_files: The ids of each trial's files.
    """

    report: StudyReport
    note: Mapping[str, Any]
    system_attrs: Mapping[str, Any]
    trial_attrs: Mapping[int, Mapping[str, Any]]
    trial_notes: Mapping[int, str]
    files: Mapping[str, File] = field(default_factory=dict)
    trial_files: Mapping[int, Sequence[str]] = field(default_factory=dict)


class _Kept:
    """What is laid over one study, made anew from time to time.

    Whoever looks first waits for it. Later ones see the last copy while one thread makes the next.

    Args:
        make: Reads the study; None if there is nothing to lay over it.
        leave: What a thread does at its end.

    Attributes:
        last: The last copy.
    """

    def __init__(self, make: Callable[[], Shown | None], leave: Callable[[], None]) -> None:
        self._make, self._leave = make, leave
        self.last: Shown | None = None
        self._until = 0.0
        self._error: Exception | None = None
        self._making = threading.Lock()

    def look(self) -> Shown | None:
        """The copy to show.

        Raises:
            Exception: What making it raised, here or in the thread.
        """
        last, now = self.last, time.monotonic()
        if last is None or now > self._until + LONGEST_STALE_S:
            with self._making:
                return self._renewed()
        if now >= self._until and self._making.acquire(blocking=False):
            try:
                # A daemon, since the server's end does not wait for it.
                threading.Thread(target=self._renew, name="autotune-overlay", daemon=True).start()
            except BaseException:
                self._making.release()
                raise
        return last

    def _renew(self) -> None:
        try:
            self._renewed()
        except Exception as error:
            # There is nobody here to be told: whoever looks next is, and the one after waits for a new copy.
            self.last, self._error = None, error
        finally:
            self._making.release()
            self._leave()

    def _renewed(self) -> Shown | None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        start = time.monotonic()
        if self.last is None or start >= self._until:  # nobody else has made it since
            self.last = self._make()
            now = time.monotonic()
            self._until = now + max(REFRESH_S, REFRESH_SHARE * (now - start))
        return self.last


class _Attrs(Mapping[str, Any]):
    """A study's attributes; what is laid over is made when it is looked at, which the list of studies does not."""

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
        """Asked for once for each trial, so without a detour."""
        return self._whole.items()


class Overlay(BaseStorage):
    """Optuna's storage, as its dashboard is to see it; also the store of the files that it offers.

    Args:
        storage: The database.
        folder_of: Where a study's folder is.
    """

    def __init__(self, storage: Storage, folder_of: Callable[[str], Path]) -> None:
        self._base, self._folder_of = storage, folder_of
        self._kept: dict[tuple[int, str], _Kept] = {}
        self._owners: dict[int, int] = {}  # the study of each trial that was listed
        # File ids cannot be guessed from outside: they are all that stands between a foreign page and a log.
        self._namespace = uuid.uuid4()

    def shown(self, study_id: int) -> Shown | None:
        """What is laid over a study; None if autotune did not make it, or it holds no trial yet."""
        name = self._base.get_study_name_from_id(study_id)
        kept = self._kept.get((study_id, name))
        if kept is None:
            made = _Kept(partial(self._read, study_id, name), self.remove_session)
            kept = self._kept.setdefault((study_id, name), made)
        return kept.look()

    def _read(self, study_id: int, name: str) -> Shown | None:
        try:
            study = store.load_study(self._base, name)
            folder = self._folder_of(name)
            report = summary.read(study, folder, series=False)
        except UserError:
            return None
        return show(report, study_id, folder, self._namespace, _under_way(study, report, folder))

    # --- studies -------------------------------------------------------------------------------------------------------

    def get_all_studies(self) -> list[FrozenStudy]:
        """Every study, ours without what is for programs."""
        every = sorted(self._base.get_all_studies(), key=lambda found: found._study_id)
        for found in every:
            found.user_attrs = _readable(found.user_attrs)
            own = found.system_attrs
            found.system_attrs = _Attrs(own, partial(self._attrs, found._study_id, own))  # type: ignore[assignment]
        return every

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        """The study's attributes with our notes, graphs and files, where the user has not put their own."""
        return self._attrs(study_id, self._base.get_study_system_attrs(study_id))

    def _attrs(self, study_id: int, own: Mapping[str, Any]) -> dict[str, Any]:
        shown = self.shown(study_id)
        if shown is None:
            return dict(own)
        # Whoever edited the note replaced it whole.
        note = {} if NOTE_VERSION in own else shown.note
        return {**own, **shown.system_attrs, **note}

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        """The study's attributes, without what is for programs."""
        return _readable(self._base.get_study_user_attrs(study_id))

    def get_study_id_from_name(self, study_name: str) -> int:
        """Read through."""
        return self._base.get_study_id_from_name(study_name)

    def get_study_name_from_id(self, study_id: int) -> str:
        """Read through."""
        return self._base.get_study_name_from_id(study_id)

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        """Read through."""
        return self._base.get_study_directions(study_id)

    # --- trials --------------------------------------------------------------------------------------------------------

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """The trials, each with its mark, its failure and its metrics with units beside it."""
        shown = self.shown(study_id)
        trials = self._base.get_all_trials(study_id, deepcopy=False, states=states)
        self._owners.update((trial._trial_id, study_id) for trial in trials)
        found = [self._trial(trial, shown) for trial in trials]
        return copy.deepcopy(found) if deepcopy else found

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """The trial, as in `get_all_trials`."""
        study_id = self._owners.get(trial_id)
        return self._trial(self._base.get_trial(trial_id), None if study_id is None else self.shown(study_id))

    def _trial(self, found: FrozenTrial, shown: Shown | None) -> FrozenTrial:
        if not {CANDIDATE_ATTR, TOLD_BY_ATTR} & found.user_attrs.keys():  # one of another program's
            return found
        trial = copy.copy(found)
        extra = shown.trial_attrs.get(found.number, {}) if shown else {}
        trial.user_attrs = {
            **extra,
            **{name: value for name, value in found.user_attrs.items() if name not in OWN_ATTRS},
        }
        if shown:
            files = {artifact: shown.files[artifact] for artifact in shown.trial_files.get(found.number, ())}
            trial._system_attrs = {**found._system_attrs, **_artifact_attrs(files)}
        return trial

    # --- files: the three methods of Optuna's ArtifactStore ------------------------------------------------------------

    def open_reader(self, artifact_id: str) -> BinaryIO:
        """The content of a file. Only ids that were handed out open anything, so there is no path to climb.

        Raises:
            ArtifactNotFound: There is no such file.
        """
        for shown in [kept.last for kept in list(self._kept.values())]:
            content = shown.files[artifact_id].read() if shown and artifact_id in shown.files else None
            if content is not None:
                return io.BytesIO(content)
        raise ArtifactNotFound("no such file")

    # --- writing -------------------------------------------------------------------------------------------------------

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        """Keeps a note; everything else is refused."""
        if not key.startswith(EDITABLE):
            self._refuse()
        self._base.set_study_system_attr(study_id, key, value)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ReadOnlyError("this dashboard shows what autotune measured and changes nothing but notes")

    create_new_study = delete_study = set_study_user_attr = create_new_trial = _refuse
    set_trial_param = set_trial_state_values = set_trial_intermediate_value = _refuse
    set_trial_user_attr = set_trial_system_attr = write = remove = _refuse

    def remove_session(self) -> None:
        """Ends this thread's connection."""
        self._base.remove_session()


def _readable(attrs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attrs.items() if name not in OWN_ATTRS}


def show(report: StudyReport, study_id: int, folder: Path, namespace: uuid.UUID, left: str = "") -> Shown:
    """What is laid over a study.

    Args:
        report: The study.
        study_id: Its number in the database.
        folder: Its folder.
        namespace: What file ids are derived from.
        left: What is left of it while it is under way.
    """
    files: dict[str, File] = {}
    trial_files: dict[int, list[str]] = {}

    def keep(owner: str, file: File) -> str:
        artifact = str(uuid.uuid5(namespace, f"{study_id}/{owner}/{file.name}"))
        files[artifact] = file
        return artifact

    picks = {name: keep("picks", pick_file(report, name, pick)) for name, pick in report.picks.items()}
    for row in report.trials:
        number = row["trial"]
        kept = [File(name="ds_config.json", mimetype="application/json", read=partial(config_json, report, row))]
        path = store.trial_path(folder, number)
        kept += [_log(log) for log in sorted(path.glob("rank-*.log"))]
        kept += [_kept(trace, "application/gzip") for trace in sorted(path.glob("profile/trace-rank-*.json.gz"))]
        trial_files[number] = [keep(str(number), file) for file in kept]
    return Shown(
        report=report,
        note=_note(report, study_id, left),
        system_attrs={**_graphs(report), **_artifact_attrs({artifact: files[artifact] for artifact in picks.values()})},
        trial_attrs={
            row["trial"]: _beside(report, row, report.points().get(row["trial"], row)) for row in report.trials
        },
        trial_notes={
            row["trial"]: readme.trial_note(report, row, trial_link(study_id, row["trial"])) for row in report.trials
        },
        files=files,
        trial_files=trial_files,
    )


def pick_file(report: StudyReport, name: str, pick: Data) -> File:
    """The JSON of a pick, as it drops into a training."""
    return File(name=f"{report.name}-{name}.json", mimetype="application/json", read=partial(config_json, report, pick))


def config_json(report: StudyReport, point: Data) -> bytes:
    """The complete DeepSpeed configuration of a pick or a trial, as a file."""
    config = deepspeed_config(point, report.study.get("base_config") or {})
    return (json.dumps(config, indent=2, allow_nan=False) + "\n").encode()


def _kept(path: Path, mimetype: str) -> File:
    def read() -> bytes | None:
        try:
            return path.read_bytes()
        except OSError:
            return None

    return File(name=path.name, mimetype=mimetype, read=read)


def _log(path: Path) -> File:
    """A rank's log, as it may be shown: what a script prints of its tokens stays in the file."""
    whole = _kept(path, "text/plain; charset=utf-8")

    def read() -> bytes | None:
        content = whole.read()
        return None if content is None else masking.masked(content.decode(errors="replace")).encode()

    return replace(whole, read=read)


def _artifact_attrs(files: Mapping[str, File]) -> dict[str, str]:
    return {
        ARTIFACT_PREFIX + artifact: json.dumps(
            {"artifact_id": artifact, "filename": file.name, "mimetype": file.mimetype, "encoding": None}
        )
        for artifact, file in files.items()
    }


class _Written:
    """A storage that only keeps what optuna-dashboard writes, so that its own functions choose the keys."""

    def __init__(self) -> None:
        self.attrs: dict[str, Any] = {}

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        return self.attrs

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        self.attrs[key] = value


def _scratch() -> optuna.Study:
    return optuna.create_study(storage=optuna.storages.InMemoryStorage())


def _under_way(study: optuna.Study, report: StudyReport, folder: Path) -> str:
    """How much of its budget a study that is being run has left; empty where nobody runs it."""
    stated = study.user_attrs.get(store.SETTINGS_ATTR, {})
    n_trials = stated.get("trials")
    if n_trials is None or run_under_way(folder) is None:
        return ""
    walls_s = [row["wall_s"] for row in report.trials if row["outcome"] != Outcome.PREDICTED_OOM]
    # What was predicted not to fit cost nothing, until it is as much as the whole budget (`study.Runner`).
    n_spent = len(report.trials) - min(len(report.trials) - len(walls_s), n_trials)
    if n_spent >= n_trials or report.study["ended"]:
        return "**Under way**: the search is over, and what it found is being checked."
    left_s = (n_trials - n_spent) * statistics.median(walls_s) if walls_s else math.inf
    if stated.get("time_budget_s") is not None:
        left_s = min(left_s, max(0.0, stated["time_budget_s"] - report.study["wall_s"]))
    about = f", about {units.duration(left_s)} left" if math.isfinite(left_s) else ""
    return f"**Under way**: {n_spent} of {n_trials} trials{about}."


def _note(report: StudyReport, study_id: int, left: str) -> dict[str, Any]:
    from optuna_dashboard import save_note

    scratch = _scratch()
    answer = readme.study_note(report, lambda name: pick_link(study_id, name))
    save_note(scratch, f"{left}\n\n{answer}" if left else answer)
    found: dict[str, Any] = scratch._storage.get_study_system_attrs(scratch._study_id)
    return {key: value for key, value in found.items() if key.startswith(EDITABLE)}


def _graphs(report: StudyReport) -> dict[str, Any]:
    from optuna_dashboard import save_plotly_graph_object

    found: dict[str, Any] = {}
    for name, figure in figures.front(report).items():
        scratch, kept = _scratch(), _Written()
        scratch._storage = kept  # type: ignore[assignment]
        save_plotly_graph_object(scratch, SimpleNamespace(to_json=partial(json.dumps, figure)), graph_object_id=name)
        found |= kept.attrs
    return found


def _beside(report: StudyReport, row: Data, point: Data) -> dict[str, Any]:
    """What a trial's line says beside its parameters; figures are rounded, since the dashboard prints them whole."""
    found: dict[str, Any] = {"configuration": words(row["candidate"])}
    marks = report.marks().get(row["trial"])
    if marks:
        found["mark"] = ", ".join(marks)
    if row["outcome"] != "complete":
        phase = f" in {row['phase']}" if row.get("phase") not in (None, "", "done") else ""
        reason = f": {row['reason']}" if row.get("reason") else ""
        found["failure"] = f"{str(row['outcome']).replace('_', ' ')}{phase}{reason}"
    elif row.get("feasible") is False:
        found["failure"] = "breaks a constraint"
    for name, value in measured(point).items():
        scale = units.scale(name, [value])
        base = (
            units.SIZES[2]
            if METRICS[name].unit == "B"
            else (1e-3, "ms")
            if name == "step_time_s"
            else (1.0, METRICS[name].unit)
        )
        found[f"{METRICS[name].label} ({base[1]})"] = round(value / base[0], max(2, scale.decimals))
    factor = speedup(report, point) if measured(point) else None
    if factor:
        found["speed-up"] = round(factor, 3)
    return found


def pick_link(study_id: int, name: str) -> str:
    """Where the server hands out the JSON of a pick."""
    return f"/autotune/{study_id}/picks/{name}.json"


def trial_link(study_id: int, number: int) -> str:
    """Where the server hands out the JSON of a trial."""
    return f"/autotune/{study_id}/trials/{number}.json"
