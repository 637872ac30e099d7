"""`autotune changes` and `autotune retune`: find what changed since a study, and tune it again where needed."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.report.progress import ProgressView
from autotune.retune import fingerprint, retuning, schedule
from autotune.retune.decision import Decision, RetuneVerdict
from autotune.retune.fingerprint import Fingerprint
from autotune.retune.retuning import RetuneRequest, Retuning
from autotune.retune.schedule import Schedule
from autotune.session import OpenStudy, open_study
from autotune.study.events import Broadcast, EventSink, Journal
from autotune.study.lock import study_lock
from autotune.study.setup.engine import executor_for
from autotune.study.setup.plan import plan, profiled
from autotune.study.spec.spec import StudySpec
from autotune.study.storage import records
from autotune.study.storage.history import GoneError
from autotune.system.files import shown
from autotune.system.signals import status_of, terminable

# Exit statuses, documented in docs/retuning.md.
STATUS = {RetuneVerdict.UNCHANGED: 0, RetuneVerdict.FAILED: 1, RetuneVerdict.IMPROVED: 3}
CAUSES = ("if_due", "if_stale", "force")


def changes(study: str, storage: str | None, *, quick: bool, as_json: bool) -> None:
    """Print what has changed since the study found its answer (`autotune changes`)."""
    opened = open_study(study, storage)
    kept, look = opened.record, opened.folder / "retunes" / "look"
    if quick:
        found = fingerprint.quick_changes(kept, opened.target)
    else:
        wanted = opened.spec()
        with ProgressView() as view, terminable():
            view.doing(f"loading {shown(wanted.target)}, to see what it is today")
            with executor_for(wanted, look) as executor:
                now = Fingerprint.now(plan(wanted, executor, look))
        shutil.rmtree(look, ignore_errors=True)
        found = fingerprint.changes(Fingerprint.of(kept), now)
    if as_json:
        print(json.dumps([change.to_data() for change in found], indent=1))
        return
    print("\n".join(fingerprint.lines(found)) or f"nothing has changed that study {study!r} depends on")


def retune(
    study: str, storage: str | None, options: Mapping[str, Any], checkpoint: Path | None, *, as_json: bool
) -> int:
    """Measure whether a study's answer still holds, and find a better one if not (`autotune retune`).

    Args:
        study: The study.
        storage: Its database.
        options: `if_due`, `if_stale`, `force`, and the fields of `RetuneRequest`.
        checkpoint: State from which the noise scale is measured.
        as_json: Print JSON.

    Returns:
        Exit status: 0 unchanged or not due, 3 improved, 1 failed, 130 interrupted (143 by SIGTERM).
    """
    given = [name for name in CAUSES if options.get(name)]
    if len(given) > 1:
        raise UserError("retune: give one of --if-due, --if-stale, --force")
    cause = {"if_due": "due", "if_stale": "stale", "force": "forced"}[given[0]] if given else "asked"
    opened = open_study(study, storage)
    asked = RetuneRequest(
        cause=cause, min_gain=options["min_gain"], trials=options["trials"], on_change=options["on_change"] or ""
    )
    history = opened.history
    _ = opened.record  # raises first where there is no such study
    due = _due(opened) if cause == "due" else []
    if due is None:
        return STATUS[RetuneVerdict.UNCHANGED]
    overrides = _from_checkpoint(checkpoint)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(study_lock(opened.folder))
        except UserError as error:
            if cause == "due":  # the process that runs the study does what is due; that is no error
                print(f"autotune: {error}; nothing is done", file=sys.stderr)
                return STATUS[RetuneVerdict.UNCHANGED]
            raise
        stack.enter_context(records.failing_in_words(opened.url))
        # The process that held the lock may have done what was due.
        if cause == "due" and (due := _due(open_study(study, storage))) is None:
            return STATUS[RetuneVerdict.UNCHANGED]
        view = Broadcast(Journal(opened.folder), stack.enter_context(ProgressView()))
        stack.enter_context(terminable())
        try:
            schedule.started(history, due or [])
            wanted = opened.spec(overrides)
            run = Retuning(name=study, folder=opened.folder, url=opened.url, asked=asked, observer=view)
            run.begin()
            decision = _decided(run, wanted, view)
        except retuning.AttemptsError as error:
            print(f"autotune: {error}", file=sys.stderr)
            return STATUS[RetuneVerdict.FAILED]
        except KeyboardInterrupt as stop:
            print(f"autotune: stopped; it goes on where it was with: autotune retune {study}", file=sys.stderr)
            return status_of(stop)
    if as_json:
        print(json.dumps(decision.to_data(), indent=1))
    else:
        print("\n".join(decision.lines()))
    return STATUS[decision.verdict]


def _decided(run: Retuning, wanted: StudySpec, view: EventSink) -> Decision:
    view.doing(f"study {run.name}: importing torch and DeepSpeed once")
    try:
        with executor_for(wanted, run.path) as executor:
            found = profiled(plan(wanted, executor, run.path), executor, run.path, view.waiting)
            return run.run(found, executor)
    except (records.StoreError, GoneError):
        raise
    except UserError as error:
        return run.fail(str(error))


def _due(opened: OpenStudy) -> list[Schedule] | None:
    """The schedules that are due; empty to continue an interrupted re-tuning; None if there is nothing to do."""
    history, study = opened.history, opened.name
    found = schedule.due(history, study)
    if found:
        changed = [each for each in found if each.on_change]
        if len(changed) == len(found):
            now = fingerprint.here(opened.record, opened.target)
            if not fingerprint.changes(retuning.last_looked_at(history, study, opened.record), now):
                schedule.started(history, found)
                print(f"study {study!r} was due, but nothing has changed since", file=sys.stderr)
                found = []
    if found or history.interrupted(study) is not None:
        return found
    soonest = min((Schedule.of(row) for row in history.schedules(study)), key=lambda each: each.next_run_at)
    print(f"study {study!r} is not due; next: {schedule.moment(soonest.next_run_at)} ({soonest.when})", file=sys.stderr)
    return None


def _from_checkpoint(checkpoint: Path | None) -> dict[str, Any]:
    if checkpoint is None:
        return {}
    if not checkpoint.exists():
        raise UserError(f"--checkpoint {checkpoint}: there is no such folder")
    return {"from_checkpoint": str(checkpoint)}
