"""The commands that keep an answer right: changes, retune, schedule, history, delete."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune import UserError, fingerprint, schedule, schedule_export, store
from autotune import retune as retuning
from autotune.commands import STUDIES, locate, terminable, wanted_study
from autotune.console import ProgressView
from autotune.decision import Decision, Verdict
from autotune.fingerprint import Fingerprint
from autotune.history import GoneError, History, Row
from autotune.journal import Journal
from autotune.lock import status_of, study_lock
from autotune.plan import executor_for, plan, profiled, shown
from autotune.retune import Asked, Retuning
from autotune.schedule import Daemon, Schedule, ScheduleError
from autotune.spec import StudySpec
from autotune.store import StudyRecord

# What scripts look at; documented in the README.
STATUS = {Verdict.UNCHANGED: 0, Verdict.FAILED: 1, Verdict.IMPROVED: 3}
CAUSES = ("if_due", "if_stale", "force")


def changes(study: str, storage: str | None, *, quick: bool, as_json: bool) -> None:
    """`autotune changes`: what of the environment is not as it was when the study found its answer."""
    folder, url = locate(study, storage)
    kept = _record(study, url)
    if quick:
        found = fingerprint.quick_changes(kept, _target(study, folder, kept, url))
    else:
        wanted = _spec(study, folder)
        with ProgressView() as view, terminable():
            view.doing(f"loading {shown(wanted.target)}, to see what it is today")
            with executor_for(wanted, folder / "retunes" / "look") as executor:
                now = Fingerprint.now(plan(wanted, executor, folder / "retunes" / "look"))
        shutil.rmtree(folder / "retunes" / "look", ignore_errors=True)
        found = fingerprint.changes(Fingerprint.of(kept), now)
    if as_json:
        print(json.dumps([change.to_data() for change in found], indent=1))
        return
    print("\n".join(fingerprint.lines(found)) or f"nothing that study {study!r} depends on has changed")


def retune(
    study: str, storage: str | None, options: Mapping[str, Any], checkpoint: Path | None, *, as_json: bool
) -> int:
    """`autotune retune`: measures whether a study's answer is still right, and finds a better one if it is not.

    Args:
        study: The study.
        storage: Its database.
        options: `if_due`, `if_stale`, `force`, and the fields of `Asked`.
        checkpoint: State from which the noise scale is measured.
        as_json: Print JSON.

    Returns:
        Exit status: 0 unchanged or not due, 3 improved, 1 failed, 130 interrupted (143 by SIGTERM).
    """
    given = [name for name in CAUSES if options.get(name)]
    if len(given) > 1:
        raise UserError("retune: give one of --if-due, --if-stale, --force")
    cause = {"if_due": "due", "if_stale": "stale", "force": "forced"}[given[0]] if given else "asked"
    folder, url = locate(study, storage)
    asked = Asked(
        cause=cause, min_gain=options["min_gain"], trials=options["trials"], on_change=options["on_change"] or ""
    )
    history = _open(url)
    _record(study, url)  # what is no study is said before anything else
    due = _due(history, study, folder, url) if cause == "due" else []
    if due is None:
        return STATUS[Verdict.UNCHANGED]
    overrides = _from_checkpoint(checkpoint)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(study_lock(folder))
        except UserError as error:
            if cause == "due":  # whoever runs it, does what is due; a scheduler need not hear of it
                print(f"autotune: {error}; nothing is done", file=sys.stderr)
                return STATUS[Verdict.UNCHANGED]
            raise
        stack.enter_context(store.failing_in_words(url))
        # Whoever held the lock until now may have done what was due.
        if cause == "due" and (due := _due(history, study, folder, url)) is None:
            return STATUS[Verdict.UNCHANGED]
        view = Journal(stack.enter_context(ProgressView()), folder)
        stack.enter_context(terminable())
        try:
            schedule.started(history, due or [])
            wanted = _spec(study, folder, overrides)
            run = Retuning(name=study, folder=folder, url=url, asked=asked, observer=view)
            run.begin()
            decision = _decided(run, wanted, view)
        except retuning.AttemptsError as error:
            print(f"autotune: {error}", file=sys.stderr)
            return STATUS[Verdict.FAILED]
        except KeyboardInterrupt as stop:
            print(f"autotune: stopped; it goes on where it was with: autotune retune {study}", file=sys.stderr)
            return status_of(stop)
    if as_json:
        print(json.dumps(decision.to_data(), indent=1))
    else:
        print("\n".join(decision.lines()))
    return STATUS[decision.verdict]


def _decided(run: Retuning, wanted: StudySpec, view: Journal) -> Decision:
    view.doing(f"study {run.name}: importing torch and DeepSpeed once")
    try:
        with executor_for(wanted, run.path) as executor:
            found = profiled(plan(wanted, executor, run.path), executor, run.path, view.waiting)
            return run.run(found, executor)
    except (store.StoreError, GoneError):
        raise
    except UserError as error:
        return run.fail(str(error))


def _due(history: History, study: str, folder: Path, url: str) -> list[Schedule] | None:
    """The schedules that are due; empty for what was interrupted; None if there is nothing to do."""
    found = schedule.due(history, study)
    if found:
        changed = [each for each in found if each.on_change]
        if len(changed) == len(found):
            kept = _record(study, url)
            now = fingerprint.here(kept, _target(study, folder, kept, url))
            if not fingerprint.changes(retuning.last_looked_at(history, study, kept), now):
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


def schedule_add(study: str, storage: str | None, every: str | None, cron: str | None, on: str | None) -> None:
    """`autotune schedule add`."""
    if on not in (None, "environment-change"):
        raise UserError(f"schedule: --on {on!r}: only environment-change is known")
    every_s, fields = schedule.rule_of(every, cron)
    history, _ = _history(study, storage)
    values = {
        "every_s": every_s,
        "cron": fields,
        "on_change": on is not None,
        "next_run_at": schedule.next_after(every_s, fields, time.time()),
    }
    number = history.add_schedule(study=study, **values)
    added = next(Schedule.of(row) for row in history.schedules(study) if row["id"] == number)
    print(f"schedule {number}: study {study} {added.when}; first at {schedule.moment(added.next_run_at)}")
    print(
        "`autotune schedule run` keeps it; `autotune schedule export` writes it for cron, systemd, Slurm, Kubernetes or GitHub",
        file=sys.stderr,
    )


def schedule_list(storage: str | None, *, as_json: bool) -> None:
    """`autotune schedule list`."""
    history = _open(storage or store.default_url(STUDIES))
    rows = [Schedule.of(row) for row in history.schedules()]
    if as_json:
        print(json.dumps([schedule.as_data(row) for row in rows], indent=1))
        return
    if not rows:
        print("no schedule; `autotune schedule add STUDY --every 7d` makes one", file=sys.stderr)
    for row in rows:
        print(
            f"{row.number:>3}  {row.study}: {row.when}; last {schedule.moment(row.last_run_at)}, next {schedule.moment(row.next_run_at)}"
        )


def schedule_remove(number: int, storage: str | None) -> None:
    """`autotune schedule remove`."""
    history = _open(storage or store.default_url(STUDIES))
    if not history.remove_schedule(number):
        known = ", ".join(str(row["id"]) for row in history.schedules())
        raise ScheduleError(f"there is no schedule {number}. " + (f"Known: {known}" if known else "There is none."))
    print(f"schedule {number} is removed")


def schedule_run(storage: str | None) -> None:
    """`autotune schedule run`: runs what is due until Ctrl-C or SIGTERM."""
    daemon = Daemon(
        storage or store.default_url(STUDIES.absolute()), STUDIES.absolute(), lambda text: print(text, flush=True)
    )
    print("Ctrl-C ends it.", file=sys.stderr)
    daemon.run()


def schedule_exported(form: str, study: str | None, storage: str | None) -> None:
    """`autotune schedule export`: the schedules for a scheduler of the user's."""
    history = _open(storage or store.default_url(STUDIES))
    rows = [Schedule.of(row) for row in history.schedules(study)]
    if not rows:
        raise ScheduleError("there is no schedule to export; `autotune schedule add STUDY --every 7d` makes one")
    print(schedule_export.export(form, rows, Path.cwd(), storage), end="")


def history(study: str | None, storage: str | None, what: str, limit: int, *, as_json: bool) -> None:
    """`autotune history`: measurements, recommendations and decisions across studies."""
    known = _open(storage or store.default_url(STUDIES))
    known.drop_orphans()
    rows: Sequence[Row]
    match what:
        case "measurements":
            rows = known.measurements(study, limit)
        case "recommendations":
            rows = known.recommendations(study)[:limit]
        case "decisions":
            rows = known.decisions(study)[:limit]
        case _:
            raise UserError(f"history: unknown {what!r}. Known: measurements, recommendations, decisions")
    if as_json:
        print(json.dumps(list(rows), indent=1))
        return
    for line in _history_lines(what, rows):
        print(line)
    if not rows:
        print(f"no {what} yet", file=sys.stderr)


def delete(study: str, storage: str | None, *, yes: bool) -> None:
    """`autotune delete`: removes a study, its re-tunings, its schedules and its history; what is worth committing stays."""
    folder, url = locate(study, storage)
    storage_ = store.open_storage(url, create=False)
    if study not in store.study_names(storage_):
        store.load_study(storage_, study)  # says which there are
    with contextlib.nullcontext() if not folder.is_dir() else study_lock(folder):
        if not yes:
            raise UserError(
                f"delete: {study!r} and everything measured for it would be gone; say so with --yes:"
                f" {shlex.join(['autotune', 'delete', study, '--yes'])}"
            )
        store.delete_study(storage_, study)
        History(storage_.engine).forget(study, schedules=True)
        for name in ("trials", "retunes", "scaling"):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / "report.html").unlink(missing_ok=True)
    print(f"study {study} is deleted" + (f"; {shown(folder)} keeps its small files" if folder.is_dir() else ""))


def _history_lines(what: str, rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        at = schedule.moment(row["began_at"] if what == "decisions" else row["at"])
        name = row["study"] + (f" (re-tuning {row['generation']})" if row["generation"] else "")
        if what == "measurements":
            step = f", {row['metrics']['step_time_s'] * 1e3:.4g} ms/step" if "step_time_s" in row["metrics"] else ""
            device = row["environment"].get("device_name", "")
            yield f"{at}  {name} trial {row['trial']} {row['role']}: {row['outcome']}{step}; {row['world_size']} ranks, {device}"
        elif what == "recommendations":
            low, high = row["speedup_low"], row["speedup_high"]
            speedup = (
                f", {row['speedup']:.2f}x ({low:.2f} to {high:.2f}) the baseline's throughput"
                if row["speedup"] and low
                else ""
            )
            yield f"{at}  {name} trial {row['trial']}{speedup}"
        else:
            verdict = row["verdict"] or "under way, or interrupted"
            yield f"{at}  {name} {row['cause']}: {verdict}" + (
                f": {row['evidence']['reason']}" if row["evidence"].get("reason") else ""
            )


def _record(study: str, url: str) -> StudyRecord:
    found = store.load_study(store.open_storage(url, create=False), study)
    kept = store.record(store.load_study(store.open_storage(url, create=False), store.current(found)))
    if kept is None:
        raise store.StoreError(f"study {study!r} in this database was not made by autotune, or holds no trial yet")
    return kept


def _target(study: str, folder: Path, kept: StudyRecord, url: str) -> Path:
    """The user's file: the record names it relative to the folder of the study, or re-tuning, that holds the answer."""
    current = store.current(store.load_study(store.open_storage(url, create=False), study))
    return (store.study_folder(current, folder.parent, url) / kept.target).resolve()


def _open(url: str) -> History:
    """The history in a database that is there."""
    with store.failing_in_words(url):
        return History(store.open_storage(url, create=False).engine)


def _history(study: str, storage: str | None) -> tuple[History, str]:
    _, url = locate(study, storage)
    _record(study, url)
    return _open(url), url


def _spec(study: str, folder: Path, overrides: Mapping[str, Any] | None = None) -> StudySpec:
    wanted, _ = wanted_study(str(retuning.spec_file(folder, study)), dict(overrides or {}))
    return retuning.same_name(wanted, study)
