"""Open, tune and load a study: what the command line and the library share."""

import contextlib
import importlib
import json
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from optuna.study import Study

from autotune.errors import UserError
from autotune.executors import base
from autotune.executors.base import Executor
from autotune.executors.driver_job import SUBMISSION
from autotune.report import load
from autotune.report.data import StudyReport
from autotune.report.files import write_answer
from autotune.report.readme import recommended_words, store_notes
from autotune.study import parallel, warm_start
from autotune.study.budget import closing_s
from autotune.study.events import SILENT, Broadcast, EventSink, Journal
from autotune.study.folder import RECORD_FILE, trial_path
from autotune.study.listeners import Callback, CallbackSink
from autotune.study.lock import run_under_way
from autotune.study.runner import Runner
from autotune.study.setup.capture import wanted_study
from autotune.study.setup.plan import Plan, plan, profiled, target_digest
from autotune.study.setup.request import StudyRequest
from autotune.study.spec import spec
from autotune.study.spec.spec import StudySpec
from autotune.study.spec.yaml_file import AS_RUN, as_run, read_yaml, stated_storage
from autotune.study.state import TargetEdited, forget_runs
from autotune.study.storage import database, leases, project, records
from autotune.study.storage.database import Storage, StoreMissing
from autotune.study.storage.history import History
from autotune.study.storage.leases import StudyLeases
from autotune.study.storage.records import StudyRecord
from autotune.system import files
from autotune.trial.folder import TrialDir, result_in
from autotune.trial.target import is_yaml

STUDIES = Path("studies")
# What is said of a run that was stopped before its study began; a busy baseline is measured again in place of its first measurement.
NOTHING_KEPT = (
    "stopped before the baseline, and the gradient noise scale where it is needed, were measured to their end; nothing to keep:"
    " the same {} begins anew"
)
# The first proposal needs these parts of scipy, which imports them when they are first used; the engine starts meanwhile.
NEEDED_FIRST = ("scipy.linalg", "scipy.special")
# Ranks that do nothing for a longer share of a time budget seem to hang.
QUIET_SHARE = 0.3
# A time budget below this was hardly meant in seconds.
LEAST_SENSIBLE_S = 20.0
# In a study's folder: the submission for which its trials were forgotten.
FORGOTTEN_FOR = "forgotten_for"
# In a study's folder: which file of the user states the study, and which options it was run with.
ORIGIN = "origin.json"
PATHS = ("hostfile", "from_checkpoint", "working_dir")  # keys whose values a study.yaml states relative to its folder


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The result of a run of a study.

    Attributes:
        report: The study's findings so far; None if the user stopped it before a trial ended.
        stopped: How the user stopped it, if so.
        refused: Why the run ended early, or not all files could be written: machines are away, the target was edited, a disk is full.
    """

    report: StudyReport | None
    written: Sequence[Path] = ()
    stopped: KeyboardInterrupt | None = None
    refused: UserError | None = None


@dataclass(frozen=True)
class OpenStudy:
    """A study in its database; each part is read when it is first asked for, and once."""

    name: str
    folder: Path
    url: str

    @cached_property
    def storage(self) -> Storage:
        """The database; a `StoreError` if it is not there, or does not answer."""
        with self._naming_what_the_folder_holds():
            return database.open_storage(self.url, create=False)

    @cached_property
    def study(self) -> Study:
        """The Optuna study of that name; a `StoreError` if it is not in the database."""
        storage = self.storage
        with self._naming_what_the_folder_holds():
            return records.load_study(storage, self.name)

    @contextlib.contextmanager
    def _naming_what_the_folder_holds(self) -> Iterator[None]:
        """Say of a study that is not in the database that it has just begun, or how its trials are taken up again, if they are there."""
        try:
            yield
        except StoreMissing as error:
            if (pid := run_under_way(self.folder)) is not None:
                by = f"process {pid}" if pid else "another process"
                begun = f"study {self.name!r} is being run by {by}, and this database does not hold it (it is added with its baseline)"
                raise StoreMissing(f"{begun}: `autotune status {self.name}` shows how far it is") from None
            if records.kept_in(self.folder) is None:
                raise
            again = shlex.join(["autotune", "run", str(files.shown(as_run(self.folder)))])
            holds = f"The folder of {self.name} holds its trials: `{again}` takes them up again"
            raise StoreMissing(f"{str(error).rstrip('.')}. {holds}") from None

    def is_own(self) -> bool:
        """Whether the study is this project's, where several share the database."""
        return project.is_own(self.study, self.folder.parent)

    def check_own(self) -> None:
        """Refuse a study of another project in the same database, with a `StoreError`."""
        project.check_own(self.study, self.folder.parent)

    @cached_property
    def answer(self) -> Study:
        """The Optuna study that holds the answer today: the last re-tuning that replaced it, else the study itself."""
        return records.load_study(self.storage, records.current(self.study))

    @cached_property
    def record(self) -> StudyRecord:
        """The record of the study that holds the answer; a `StoreError` if no trial has ended, or Optuna made it."""
        if (kept := records.record(self.answer)) is None:
            said = "in this database was not made by autotune, or holds no trial yet"
            raise database.StoreError(f"study {self.name!r} {said}")
        return kept

    @cached_property
    def report(self) -> StudyReport:
        """The study's findings so far."""
        storage = self.storage
        with self._naming_what_the_folder_holds():
            return load.from_storage(storage, self.name, self.folder)

    @cached_property
    def history(self) -> History:
        """The history in the study's database."""
        return open_history(self.url, self.storage)

    @property
    def target(self) -> Path:
        """The user's file, which the record names relative to the folder of the study that holds the answer."""
        folder = records.study_folder(self.answer.study_name, self.folder.parent, self.url)
        return _named_from(folder, self.record.target)

    def spec(self, overrides: Mapping[str, Any] | None = None) -> StudySpec:
        """Read the study as the user states it today: from the user's own file, else from the copy in its folder.

        Args:
            overrides: Fields of `StudySpec` that replace those of the file; None leaves a field as it is.

        Raises:
            UserError: Both files are gone, or the study cannot be read.
        """
        file, given = _stated_in(self.folder)
        if not file.is_file():
            raise UserError(
                f"study {self.name!r}: {file} is missing, so what to run is not known;"
                " put it back, or tune anew with `autotune run`"
            )
        given |= {key: value for key, value in (overrides or {}).items() if value is not None}
        wanted, _ = wanted_study(str(file), given)
        return wanted if wanted.name == self.name else wanted.model_copy(update={"name": self.name})


def open_study(study: str, storage: str | None = None, studies: Path = STUDIES) -> OpenStudy:
    """Find the folder and the database of a study; neither is touched yet.

    Args:
        storage: Its database; by default the one that its study.yaml states, else the one beside the studies.

    Raises:
        UserError: The text cannot name a study.
    """
    with contextlib.suppress(ValueError):
        spec.check_name(study)
        url = storage or stated_storage(studies / study / "study.yaml") or records.default_url(studies)
        return OpenStudy(study, records.study_folder(study, studies.absolute(), url), url)
    raise UserError(_no_name(study))


def _no_name(text: str) -> str:
    """Why a text names no study; that of a study's folder, as a shell completes it, says which name is meant."""
    path = Path(text).parent if text.endswith("study.yaml") else Path(text)
    if not (path / "study.yaml").is_file():
        return f"{text!r} cannot name a study; `autotune ls studies` lists them"
    project = path.absolute().parent.parent
    where = "" if project == Path.cwd() else f", in the folder {project}"
    return f"{text!r} is a path; give the name of the study, {path.absolute().name}{where}"


def default_storage() -> str:
    """The database that is meant where neither a URL nor a study is named: the one beside the studies.

    If there is none, all of them may be in one that their study.yaml files state.
    """
    beside = records.default_url(STUDIES)
    if Path(database.file_of(beside)).exists():
        return beside
    stated = {url for path in STUDIES.glob("*/study.yaml") if (url := stated_storage(path))}
    return stated.pop() if len(stated) == 1 else beside


def open_history(url: str | None, storage: Storage | None = None) -> History:
    """Open the history in a database that exists, by default that of the studies; `storage` if it is open already."""
    url = url or default_storage()
    with database.failing_in_words(url):
        return History((storage or database.open_storage(url, create=False)).engine)


def tune(
    request: StudyRequest, *, fresh: bool, learn: bool, view: EventSink = SILENT, callbacks: Sequence[Callback] = (),
    began_s: float | None = None,
) -> Tuned:  # fmt: skip
    """Run a study to the end of its budget, or until the user stops it, and write its answer.

    Args:
        fresh: Delete the study's earlier trials.
        learn: Start from the findings of a related study.
        callbacks: Called after each trial with the Optuna study and the trial.
        began_s: When the command began, in seconds of the monotonic clock, where that was earlier.
    """
    began_s, began_at = time.monotonic() if began_s is None else began_s, time.time()
    wanted, folder = request.spec, request.folder
    url = wanted.storage or records.default_url(folder.parent)
    interrupted: KeyboardInterrupt | None = None
    refused: UserError | None = None
    storage = database.open_storage(url)  # before the engine is waited for, so that an error shows at once
    storage.patience_s = database.PATIENCE_S
    with database.failing_in_words(url):
        held = leases.StudyLeases(storage, wanted.name)
        with held.leading(view.say):
            try:
                heard = Broadcast(view, CallbackSink(callbacks, storage, wanted.name)) if callbacks else view
                found, logged = _planned(request, heard, began_s)
                with parallel.executors_for(found, request.executor, folder, logged) as slots:
                    if fresh:  # once it is known that all of the run's engines are there
                        _forget(wanted.name, storage, folder, request.executor)
                        fresh = False  # what is there from now on is this run's
                    runner = opened_runner(found, request.executor, folder, held, logged, slots, learn=learn)
                    _keep_spec(request)
                    for note in (*request.notes, *found.notes):
                        logged.say(note)
                    runner.run()
            except KeyboardInterrupt as stop:
                interrupted = stop
            except (base.MachinesGone, TargetEdited) as why:
                refused = why
            except base.TimeOver:
                refused = UserError(_too_little_time(wanted.time_budget_s or 0.0, folder, began_at, fresh=fresh))
    with database.failing_in_words(url):
        if not fresh and wanted.name in records.study_names(storage):
            return _answered(storage, url, request, Tuned(report=None, stopped=interrupted, refused=refused))
    if refused is not None:
        raise refused
    return Tuned(report=None, stopped=interrupted)


def _too_little_time(budget_s: float, folder: Path, began_at: float, *, fresh: bool = False) -> str:
    """Why a run brought no measurement: its time budget was too short, or is spent, or ranks stood still.

    Args:
        began_at: When the run began, as Unix time: what earlier runs left is no sign of it.
        fresh: Whether earlier runs do not count, and are not forgotten yet.
    """
    unit = f" (a number is seconds: {budget_s:.0f}m are minutes)" if budget_s < LEAST_SENSIBLE_S else ""
    if not fresh and result_in(trial_path(folder, 0)) is not None:
        return f"the time budget of {budget_s:.0f} s{unit}, in which earlier runs count, is spent; a larger --time-budget goes on"
    said = f"the time budget of {budget_s:.0f} s{unit} ended before the baseline was measured"
    signs = [path for pattern in ("events.jsonl", "rank-*.log") for path in folder.glob(f"trials/*/{pattern}")]
    signs = [path for path in signs if path.stat().st_mtime > began_at]
    last = max(signs, key=lambda path: path.stat().st_mtime, default=None)
    if last is None or (quiet_s := time.time() - last.stat().st_mtime) < QUIET_SHARE * budget_s:
        return f"{said}; give more time"
    log = files.shown(TrialDir(last.parent).log(0))
    return f"{said}, and its ranks did and said nothing for the last {quiet_s:.0f} s: see where they hang ({log}), or give more time"


def _answered(storage: Storage, url: str, request: StudyRequest, tuned: Tuned) -> Tuned:
    """A run with the report of its study, and with the files that state the answer, as far as they can be written."""
    name, folder = request.spec.name, request.folder
    report = load.from_storage(storage, name, folder)
    written, refused = list[Path](), tuned.refused
    try:
        with database.failing_in_words(url):
            written.extend(write_answer(report, folder))
            if report.study["stored_as"] == name:
                History(storage.engine).recommended(name, 0, report.picks.get("recommended"), recommended_words(report))
                store_notes(records.load_study(storage, name), report)
    except database.StoreError as error:
        refused = refused or error
    return replace(tuned, report=report, written=written, refused=refused)


def _planned(request: StudyRequest, view: EventSink, began_s: float) -> tuple[Plan, EventSink]:
    """Wait for the engine and plan the study; the events go to its journal, too."""
    wanted, executor, folder = request.spec, request.executor, request.folder
    logged = Broadcast(Journal(folder), view)
    executor.on_queue = logged.waits
    logged.doing(f"study {wanted.name}: importing torch and DeepSpeed once")
    for name in NEEDED_FIRST:
        importlib.import_module(name)
    executor.start()
    if wanted.time_budget_s is not None:
        executor.ends_at_s = began_s + wanted.time_budget_s - closing_s(wanted.time_budget_s)
    found = replace(plan(wanted, executor, folder, logged), began=began_s)
    return profiled(found, executor, folder, logged), logged


def _forget(name: str, storage: Storage, folder: Path, executor: Executor) -> None:
    """Remove a study's trials and re-tunings from the database and from its folder; once for each submission to an engine."""
    submission, mark = os.environ.get(SUBMISSION, ""), folder / FORGOTTEN_FOR
    if submission and mark.exists() and mark.read_text() == submission:
        return
    if name in records.study_names(storage):
        project.check_own(records.load_study(storage, name), folder.parent)
    records.delete_study(storage, name)
    (folder / RECORD_FILE).unlink(missing_ok=True)
    for each in (folder, *folder.glob("retunes/*")):
        forget_runs(executor, each)
    shutil.rmtree(folder / "retunes", ignore_errors=True)  # or a lost database would be had back with their answer
    if submission:
        files.write_text(mark, submission)


def _keep_spec(request: StudyRequest) -> None:
    """Write the study as it was understood, and the name of the user's file; not of a plain run of the folder's study.yaml."""
    folder, target = request.folder, request.target
    file, origin = folder / "study.yaml", folder / ORIGIN
    options = [key for key, value in request.overrides.items() if value is not None and key != "storage"]
    beside, named = folder / AS_RUN, target.absolute()
    copy = beside if named in (file.absolute(), beside.absolute()) else file
    if named == beside.absolute():  # the options of the run before count, too; all of it, if it was edited
        stated_in, before = _stated_in(folder)
        named = named if stated_in.name == AS_RUN else file.absolute()
        options = list(dict.fromkeys([*before, *options]))
    else:
        beside.unlink(missing_ok=True)
    if copy == beside and not options:
        return
    files.write_text(copy, request.spec.to_yaml(folder))
    origin.unlink(missing_ok=True)
    # Arguments that were appended to a launch command are in the copy's command alone.
    if is_yaml(target) and not (request.spec.command and "script_args" in options):
        path = os.path.relpath(named, folder.absolute())
        kept = {"file": path, "options": options, "copy": target_digest(copy)}
        files.write_text(origin, json.dumps(kept, indent=1))


def _stated_in(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file that states a study today, and the values of the options that it was run with.

    That is the user's own file, but the copy in the study's folder if the user has edited that or the other one is gone.
    """
    copy = as_run(folder)
    try:
        kept = files.json_of(files.read_regular(folder / ORIGIN))
        own = _named_from(folder, kept["file"])
        if not own.is_file() or target_digest(copy) != kept["copy"]:
            return copy, {}
        stated, fields = read_yaml(copy), StudySpec.model_fields
        # The copy leaves out what is as by default, which the user's own file may state otherwise.
        given = {key: stated.get(key, fields[key].get_default(call_default_factory=True)) for key in kept["options"]}
        given = {key: value for key, value in given.items() if value is not None}
    except (OSError, ValueError, KeyError, TypeError):
        return copy, {}
    return own, given | {key: str(folder / given[key]) for key in PATHS if key in given}


def _named_from(folder: Path, path: str) -> Path:
    """A file that a study names relative to its folder: as `os.path.relpath` made the name, also where that folder is behind a link."""
    found = Path(os.path.abspath(folder / path))
    # The second where the study is read through a link that was made later.
    return found if found.exists() else (folder / path).resolve()


def opened_runner(
    plan: Plan, executor: Executor, folder: Path, held: StudyLeases, events: EventSink, slots: Sequence[Executor] = (),
    *, learn: bool = True, leads: bool = True,
) -> Runner:  # fmt: skip
    """Open a study to be run.

    Args:
        slots: Engines for the trials that run at once.
        learn: Start from a related study; the physics sampler alone does.
        leads: Whether this coordinator leads the study; else it helps.

    Raises:
        UserError: The study of that name is another one.
    """
    storage = held.storage
    History(storage.engine).drop_orphans()
    known = warm_start.related(storage, plan, folder.parent) if learn and plan.spec.sampler == "physics" else None
    warm = None
    if known is not None:
        first = [c for c in known.best if plan.space.contains(c, plan.baseline)][: warm_start.MAX_FIRST]
        warm = known.warm_start(plan, first)
    runner = Runner(plan, executor, folder, held, events, slots, warm=warm, leads=leads)
    runner.open()
    if runner.study is None and known is not None:
        origin = f"{len(known.told)} trials of study {known.name} ({known.relation})"
        events.say(f"starting from {origin}; --no-history leaves them out")
    return runner
