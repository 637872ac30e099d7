"""The command `worker`: join a study that `autotune run` leads on another machine, and run some of its trials."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli.options import StudyName, takes_settings
from autotune.errors import UserError
from autotune.system.files import shown
from autotune.system.signals import status_of

if TYPE_CHECKING:
    from autotune.executors.base import Executor
    from autotune.report.progress import ProgressView
    from autotune.study.setup.plan import Plan
    from autotune.study.storage import leases
    from autotune.study.storage.database import Storage
    from autotune.study.storage.records import StudyRecord


@takes_settings("storage", "parallel", "overlap")
def worker(study: StudyName, settings: Mapping[str, Any]) -> int:
    """Run trials of a study until none is left to start.

    Returns:
        Exit status: 0 none is left, 130 the user stopped it, 143 SIGTERM did, 129 SIGHUP did.
    """
    from autotune import session
    from autotune.report.progress import ProgressView
    from autotune.study import parallel
    from autotune.study.storage import database, leases

    found_study = session.open_study(study, settings["storage"])
    folder, url, storage = found_study.folder, found_study.url, found_study.storage
    if storage.is_sqlite:
        raise UserError(
            f"worker: {storage.shown} is a file, which one run at a time writes to. Several machines need"
            " a database server: start the study with `autotune run ... --storage postgresql://USER@HOST/DATABASE`"
        )
    storage.patience_s = database.PATIENCE_S
    ledger = leases.StudyLeases(storage, study)
    with ProgressView() as view, database.failing_in_words(url):
        try:
            kept, stated = _joined(folder, storage, ledger, view)
            asked = {**stated, **settings, "storage": url}
            with (
                _own_folder(folder) as own,
                _planned(folder, kept, asked, own, view) as (there, executor),
                parallel.executors_for(there, executor, own, view) as at_once,
            ):
                runner = session.opened_runner(there, executor, folder, ledger, view, at_once, learn=False, leads=False)
                view.say(f"helping {study}, led by {leader.shown if (leader := ledger.leader()) else 'nobody now'}")
                runner.help()
                view.say("nothing is left to start")
        except KeyboardInterrupt as stop:
            print("autotune: stopped; the trial under way is given back, to be run by another", file=sys.stderr)
            return status_of(stop)
    if ledger.leader() is None:
        print(
            f"autotune: nobody leads {study} now; `autotune run` measures the finalists again and writes the answer",
            file=sys.stderr,
        )
    return 0


def _joined(
    folder: Path, storage: Storage, ledger: leases.StudyLeases, view: ProgressView
) -> tuple[StudyRecord, dict[str, Any]]:
    """Wait until the study's baseline was measured; return its record and settings."""
    from autotune.study.lock import run_under_way
    from autotune.study.runner import NEWS_S
    from autotune.study.storage import records

    name, said = ledger.study_name, False
    with ledger.beating():
        while True:
            if name in records.study_names(storage):
                study = records.load_study(storage, name)
                kept = records.record(study)
                if kept is not None and records.told_trials(study) and (stated := records.STATED.of(study)):
                    return kept, {name: stated[name] for name in records.SETTINGS if name in stated}
            elif ledger.leader() is None and run_under_way(folder) is None:  # a run leads once it has imported torch
                records.load_study(storage, name)  # raises, and lists the studies
            if not said:
                said = True
                view.doing(f"waiting for the baseline of {name}, which `autotune run` measures")
            view.tick()
            time.sleep(NEWS_S)


@contextlib.contextmanager
def _own_folder(folder: Path) -> Iterator[Path]:
    """The folder of what this worker writes beside trials; what killed workers of this machine left is ended and removed.

    It stays where an error ends the worker, which may name a log in it, until the next one begins.
    """
    from autotune.study.lock import study_lock

    if not (file := folder / "study.yaml").exists():
        raise UserError(
            f"worker: there is no {shown(file)} here. A worker reads the study and writes its trials"
            " where `autotune run` does: start it in the same folder of a file system that both machines share"
        )
    trials, beginning = folder / "trials", f"worker-{re.sub(r'[^A-Za-z0-9.-]', '-', platform.node())}-"
    for left in trials.glob(f"{beginning}*"):
        if left.name.removeprefix(beginning).isdecimal():  # else that of a machine whose name begins so
            with contextlib.suppress(UserError, OSError), study_lock(left):  # held by one at work, or another user's
                shutil.rmtree(left, ignore_errors=True)
    own = trials / f"{beginning}{os.getpid()}"
    with study_lock(own):
        try:
            yield own
        except KeyboardInterrupt:
            shutil.rmtree(own, ignore_errors=True)
            raise
        shutil.rmtree(own, ignore_errors=True)


@contextlib.contextmanager
def _planned(
    folder: Path, kept: StudyRecord, overrides: dict[str, Any], scratch: Path, view: ProgressView
) -> Iterator[tuple[Plan, Executor]]:
    """The study's plan on this machine, and its engine."""
    from autotune.study.setup.capture import wanted_study
    from autotune.study.setup.engine import executor_for
    from autotune.study.setup.plan import plan
    from autotune.study.spec.yaml_file import as_run

    wanted, notes = wanted_study(str(as_run(folder)), overrides)
    view.doing(f"study {wanted.name}: importing torch and DeepSpeed once")
    with executor_for(wanted, scratch, view.waits) as executor:
        found = plan(wanted, executor, scratch, view)
        _check_machine(found, kept)
        for note in (*notes, *found.notes):
            view.say(note)
        # The leader's profile and rates, so that all coordinators predict the same for a candidate.
        yield replace(found, workload=kept.workload), executor


def _check_machine(found: Plan, kept: StudyRecord) -> None:
    """Refuse a machine whose step times cannot be compared with the leader's."""
    here, there = found.workload.environment, kept.workload.environment
    for what in ("accelerator", "device_name"):
        if getattr(here, what) != getattr(there, what):
            raise UserError(
                f"worker: this machine has {getattr(here, what)}, and the study is measured on {getattr(there, what)}:"
                " their times cannot be compared. Start another study here"
            )
    for name, version in there.versions.items():
        if here.versions.get(name) != version:
            raise UserError(
                f"worker: {name} {here.versions.get(name)} is installed here,"
                f" and {version} where the study is led; install that"
            )
