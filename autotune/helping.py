"""`autotune worker`: another machine's hands for a study that `autotune run` leads."""

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
from typing import Any

from autotune import UserError, claims, commands, experience, slots, store
from autotune.console import ProgressView
from autotune.database import Storage
from autotune.executors.base import Executor
from autotune.lock import status_of
from autotune.plan import Plan, executor_for, plan, shown
from autotune.store import StudyRecord
from autotune.study import NEWS_S, Runner

# What Optuna says of a study that is not there any more.
GONE = "Record does not exist"


def worker(study: str, storage_url: str | None, overrides: Mapping[str, Any]) -> int:
    """`autotune worker`: runs trials of a study until none is left to start.

    Returns:
        Exit status: 0 none is left, 130 the user stopped it, 143 SIGTERM did.

    Raises:
        UserError: This machine cannot help, and why.
    """
    folder, url = commands.locate(study, storage_url)
    storage = store.open_storage(url, create=False)
    if storage.is_sqlite:
        raise UserError(
            f"worker: {storage.shown} is a file, which one run at a time writes to. Several machines need a database server:"
            " start the study with `autotune run ... --storage postgresql://USER@HOST/DATABASE`"
        )
    storage.patience_s = store.PATIENCE_S
    ledger = claims.Ledger(storage, study)
    scratch = folder / "trials" / f"worker-{re.sub(r'[^A-Za-z0-9.-]', '-', platform.node())}-{os.getpid()}"
    with ProgressView() as view, commands.terminable(), store.failing_in_words(url):
        try:
            kept, settings = _joined(storage, ledger, view)
            found = _planned(folder, kept, {**settings, **overrides, "storage": url}, scratch, view)
            with found as (there, executor), slots.opened(there, executor, scratch, view.say) as at_once:
                runner = Runner(there, executor, folder, ledger, view, at_once)
                experience.attach(runner, learn=False)
                view.say(f"helping {study}, led by {leader.shown if (leader := ledger.leader()) else 'nobody now'}")
                view.say(f"nothing left to start: {runner.help()}")
        except KeyError as error:
            if GONE not in str(error):
                raise
            raise UserError(
                f"study {study!r} was deleted, or begun anew, meanwhile; to help the new one, start the worker again"
            ) from None
        except KeyboardInterrupt as stop:
            print("autotune: stopped; the trial under way is given back, to be run by another", file=sys.stderr)
            return status_of(stop)
    shutil.rmtree(scratch, ignore_errors=True)
    if ledger.leader() is None:
        print(
            f"autotune: nobody leads {study} now; `autotune run` measures the finalists again and writes the answer",
            file=sys.stderr,
        )
    return 0


def _joined(storage: Storage, ledger: claims.Ledger, view: ProgressView) -> tuple[StudyRecord, dict[str, Any]]:
    """The study's record and settings, once its baseline has been measured.

    Raises:
        UserError: There is no such study, and nobody begins it.
    """
    name, said = ledger.study_name, False
    with ledger.beating():
        while True:
            if name in store.study_names(storage):
                study = store.load_study(storage, name)
                kept = store.record(study)
                if kept is not None and store.told_trials(study) and (settings := store.settings(study)):
                    return kept, settings
            elif ledger.leader() is None:
                store.load_study(storage, name)  # says which there are
            if not said:
                said = True
                view.doing(f"waiting for the baseline of {name}, which `autotune run` measures")
            view.tick()
            time.sleep(NEWS_S)


@contextlib.contextmanager
def _planned(
    folder: Path, kept: StudyRecord, overrides: dict[str, Any], scratch: Path, view: ProgressView
) -> Iterator[tuple[Plan, Executor]]:
    """The study's plan on this machine, and its engine.

    Raises:
        UserError: The study cannot be measured here.
    """
    file = folder / "study.yaml"
    if not file.exists():
        raise UserError(
            f"worker: there is no {shown(file)} here. A worker reads the study and writes its trials where `autotune run` does:"
            " start it in the same folder of a file system that both machines share"
        )
    wanted, notes = commands.wanted_study(str(file), overrides)
    view.doing(f"study {wanted.name}: importing torch and DeepSpeed once")
    with executor_for(wanted, scratch, view.waits) as executor:
        found = plan(wanted, executor, scratch)
        _check_machine(found, kept)
        for note in (*notes, *found.notes):
            view.say(note)
        # The profile and the rates are the leader's: all coordinators expect the same of a candidate.
        yield replace(found, workload=kept.workload), executor


def _check_machine(found: Plan, kept: StudyRecord) -> None:
    """Refuses a machine whose times cannot be compared with those of the others."""
    here, there = found.workload.environment, kept.workload.environment
    for what in ("accelerator", "device_name"):
        if getattr(here, what) != getattr(there, what):
            raise UserError(
                f"worker: this machine has {getattr(here, what)}, and the study is measured on {getattr(there, what)}:"
                " their times cannot be compared. Start a study of its own here"
            )
    for name, version in there.versions.items():
        if here.versions.get(name) != version:
            raise UserError(
                f"worker: {name} {here.versions.get(name)} is installed here, and {version} where the study is led; install that"
            )
