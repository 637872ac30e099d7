"""The commands `changes` and `retune`: find what changed since a study, and tune it again where needed."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.options import AsJson, Storage, StudyName, option, same_command
from autotune.cli.terminal import fitted
from autotune.errors import Unavailable, UserError
from autotune.study.lock import study_lock
from autotune.system.files import shown
from autotune.system.machine import check_ranks
from autotune.system.signals import status_of

if TYPE_CHECKING:
    from autotune.retune.decision import Decision
    from autotune.retune.retuning import RetuneRequest, Retuning
    from autotune.retune.schedule import Schedule
    from autotune.session import OpenStudy
    from autotune.study.events import EventSink
    from autotune.study.spec.spec import StudySpec

# Exit statuses by the value of a `RetuneVerdict`, documented in docs/retuning.md.
STATUS = {"unchanged": 0, "failed": 1, "improved": 3}


def changes(
    study: StudyName,
    storage: Storage = None,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Only what shows without loading the target.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print what has changed since the study found its answer."""
    from autotune.report.progress import ProgressView
    from autotune.session import open_study
    from autotune.study import fingerprint
    from autotune.study.fingerprint import Fingerprint
    from autotune.study.setup.engine import executor_for
    from autotune.study.setup.plan import plan

    opened = open_study(study, storage)
    kept, look = opened.record, opened.folder / "retunes" / "look"
    if quick:
        now = fingerprint.here(kept, opened.target, opened.folder)
    else:
        wanted = opened.spec()
        try:
            with ProgressView() as view:
                view.doing(f"loading {shown(wanted.target)}, to see what it is today")
                with executor_for(wanted, look, view.waits) as executor:
                    now = Fingerprint.now(plan(wanted, executor, look, view))
        except KeyboardInterrupt:  # what failed leaves its logs
            shutil.rmtree(look, ignore_errors=True)
            raise
        shutil.rmtree(look, ignore_errors=True)
    found = fingerprint.changes(Fingerprint.of(kept), now)
    if as_json:
        print(json.dumps(list(map(asdict, found)), indent=1))
        return
    print(fitted("\n".join(change.words for change in found) or f"nothing has changed that study {study!r} depends on"))


def retune(
    study: StudyName,
    *,
    if_due: Annotated[bool, typer.Option("--if-due", help="Only if a schedule of the study says so.")] = False,
    if_stale: Annotated[
        bool, typer.Option("--if-stale", help="Only if something that it depends on has changed.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Search although nothing moved.")] = False,
    min_gain: Annotated[str | None, option("3%", "Replace the configuration from this gain on (default: 3%).")] = None,
    trials: Annotated[
        int | None,
        typer.Option(metavar="N", min=2, help="Trials of the search (default: a fifth of the study's, at least 6)."),
    ] = None,
    ranks: Annotated[int | None, typer.Option(metavar="N", min=1, help="Ranks (default: the study's).")] = None,
    on_change: Annotated[str | None, option("COMMAND", "Run it where the configuration was replaced.")] = None,
    checkpoint: Annotated[Path | None, option("DIR", "Measure the noise scale from this state.")] = None,
    storage: Storage = None,
    as_json: AsJson = False,
) -> int:
    """Measure whether a study's answer still holds, and find a better one if not.

    Returns:
        Exit status: 0 unchanged or not due, 3 improved, 1 failed, 130 interrupted (143 by SIGTERM, 129 by SIGHUP).
    """
    from autotune.retune import retuning
    from autotune.retune.retuning import RetuneRequest
    from autotune.session import open_study
    from autotune.study.spec.readers import read_share

    given = [cause for cause, wanted in (("due", if_due), ("stale", if_stale), ("forced", force)) if wanted]
    if len(given) > 1:
        raise UserError("retune: give one of --if-due, --if-stale, --force")
    if on_change is not None and not on_change.strip():
        raise UserError("--on-change: the command is empty; give one, or leave the option out")
    asked = RetuneRequest(
        cause=next(iter(given), "asked"), min_gain=None if min_gain is None else read_share(min_gain, "--min-gain"), trials=trials,
        on_change=on_change, ranks=ranks, checkpoint=str(checkpoint.absolute()) if checkpoint else None,
    )  # fmt: skip
    opened = open_study(study, storage)
    _ = opened.record  # raises first where there is no such study
    opened.check_own()
    if checkpoint is not None and not checkpoint.exists():
        raise UserError(f"--checkpoint {checkpoint}: there is no such folder")
    try:
        failed, decision = False, _retuned(opened, asked)
    except retuning.CommandError as error:
        print(f"autotune: {error}", file=sys.stderr)
        failed, decision = True, error.decision
    except retuning.AttemptsError as error:
        print(f"autotune: {error}", file=sys.stderr)
        return STATUS["failed"]
    except KeyboardInterrupt as stop:
        print(f"autotune: stopped; it goes on where it was with: {same_command()}", file=sys.stderr)
        return status_of(stop)
    if decision is None:
        if as_json:
            print(json.dumps({"verdict": None}))  # nothing was due
        return STATUS["unchanged"]
    print(json.dumps(decision.to_data(), indent=1) if as_json else fitted("\n".join(decision.lines())))
    return STATUS["failed" if failed else decision.verdict]


def _retuned(opened: OpenStudy, asked: RetuneRequest) -> Decision | None:
    """The decision of a re-tuning; None if none is due, or if another process runs the study and does it."""
    from autotune.report.progress import ProgressView
    from autotune.retune.retuning import Retuning
    from autotune.retune.schedule import Schedule
    from autotune.session import open_study
    from autotune.study.events import Broadcast, Journal
    from autotune.study.storage import database

    if_due, due = asked.cause == "due", list[Schedule]()
    if if_due and _due(opened) is None:
        return None
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(study_lock(opened.folder))
        except UserError as error:
            if not if_due:
                raise
            print(f"autotune: {error}; nothing is done", file=sys.stderr)
            return None
        stack.enter_context(database.failing_in_words(opened.url))
        # The process that held the lock may have done it, or found another answer.
        opened = open_study(opened.name, opened.url, opened.folder.parent)
        opened.storage.patience_s = database.PATIENCE_S
        if if_due:
            if (found := _due(opened)) is None:
                return None
            due = found
        view = Broadcast(Journal(opened.folder), stack.enter_context(ProgressView()))
        run = Retuning(opened, asked, view)
        if (state := run.asked.checkpoint) is not None and not Path(state).exists():  # as training rotates them
            return run.fail(f"--checkpoint {state}, with which it was begun, is gone; the next re-tuning begins anew")
        # A study that cannot be read stays due.
        wanted = opened.spec({"ranks": run.asked.ranks, "from_checkpoint": run.asked.checkpoint})
        if asked.ranks is not None and not wanted.runs_elsewhere:
            check_ranks(asked.ranks, "--ranks")  # what was typed wrong is no re-tuning that failed
        return _decided(run, wanted, due, view)


def _decided(run: Retuning, wanted: StudySpec, due: list[Schedule], view: EventSink) -> Decision:
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    from autotune.retune import schedule
    from autotune.retune.retuning import CommandError
    from autotune.study.setup.engine import executor_for
    from autotune.study.setup.plan import plan, profiled
    from autotune.study.storage import database
    from autotune.study.storage.history import GoneError

    view.doing(f"study {run.name}: importing torch and DeepSpeed once")
    schedule.started(run.history, due)
    run.begin()  # what ends this process from here on counts as an attempt, unless it is excused
    try:
        with executor_for(wanted, run.path, view.waits) as executor:
            found = profiled(plan(wanted, executor, run.path, view), executor, run.path, view)
            return run.run(found, executor)
    except (GoneError, CommandError):
        raise
    except (database.StoreError, SQLAlchemyError, StorageInternalError, Unavailable, OSError, KeyboardInterrupt):
        run.excuse()  # no decision; only what was killed counts as an attempt
        raise
    except UserError as error:
        return run.fail(str(error))


def _due(opened: OpenStudy) -> list[Schedule] | None:
    """The schedules that are due; None if there is nothing to do."""
    from autotune.retune import retuning, schedule
    from autotune.retune.schedule import Schedule
    from autotune.study import fingerprint

    history, study = opened.history, opened.name
    found = schedule.due(history, study)
    if found and all(each.on_change for each in found) and history.interrupted(study) is None:
        now = fingerprint.here(opened.record, opened.target, opened.folder)
        if not fingerprint.changes(retuning.last_looked_at(history, study, opened.record), now):
            schedule.started(history, found)
            print(f"study {study!r} was due, but nothing has changed since", file=sys.stderr)
            found = []
    if found:
        return found
    soonest = min((Schedule.of(row) for row in history.schedules(study)), key=lambda each: each.next_run_at)
    print(f"study {study!r} is not due; next: {schedule.moment(soonest.next_run_at)} ({soonest.when})", file=sys.stderr)
    return None
