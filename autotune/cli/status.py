"""The command `status`: print the state of a study, and follow it live while another terminal runs it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli.answer import print_answer
from autotune.cli.options import AsJson, Storage
from autotune.cli.terminal import fitted
from autotune.errors import UserError
from autotune.study.folder import RECORD_FILE
from autotune.study.lock import run_under_way
from autotune.system import device
from autotune.system.files import shown
from autotune.system.signals import status_of

if TYPE_CHECKING:
    from autotune.session import OpenStudy
    from autotune.study.events import EventSink
    from autotune.study.storage.leases import Lease

LOOK_S = 0.2
SCALING = "scaling"  # folder in a study's folder, for `autotune scale`


def running_studies(studies: Path) -> dict[str, int]:
    """The studies that a process runs or scales now, with the PID."""
    found = {path.parent.name: run_under_way(path.parent) for path in sorted(studies.glob("*/.lock"))}
    scaled = {
        path.parent.parent.name: run_under_way(path.parent) for path in sorted(studies.glob(f"*/{SCALING}/.lock"))
    }
    return {name: pid for name, pid in sorted([*scaled.items(), *found.items()]) if pid is not None}


def only_running(studies: Path) -> str:
    """The name of the one study that runs."""
    running = running_studies(studies)
    if len(running) == 1:
        return next(iter(running))
    if running:
        names, example = ", ".join(running), next(iter(running))
        raise UserError(f"status: {len(running)} studies run now: {names}. Name one: autotune status {example}")
    # Of a study that was deleted study.yaml and the answer stay.
    there = sorted(path.parent.name for path in studies.glob(f"*/{RECORD_FILE}"))
    if not there:
        raise UserError(
            f"status: no study lies in {studies}; `autotune run TARGET` begins one, --storage names another database"
        )
    raise UserError(f"status: no study runs now; name one to see what it has found: {', '.join(there)}")


def follow(folder: Path, pid: int, sink: EventSink) -> None:
    """Replay the events of a run, from its beginning, until it ends."""
    from autotune.study.events import JournalReader

    reader = JournalReader(folder, pid)
    try:
        while True:
            # The check comes before the reading, so that no event is missed between the two.
            runs = run_under_way(folder) == pid
            for event in reader.events():
                sink.emit(event)
            sink.tick()
            if not runs:
                return
            time.sleep(LOOK_S)
    finally:
        reader.close()


def lines(data: Mapping[str, Any]) -> str:
    """The state of a study in one line."""
    from autotune.report.trial_notes import counted

    does = "re-tunes" if data.get("retuned") else "runs"
    process = f"; process {data['process']} {does} it now" if data["process"] else ""
    left = ""
    if data["running"] and not data["process"]:
        left = f"; {data['running']} begun and not told: the next run takes it up, unless another machine runs it now"
    n = data["n_trials"]
    return f"study {data['name']}: {n} trial{'s' * (n != 1)} ({counted(data['outcomes'])}){process}{left}"


def _holder(lease: Lease) -> str:
    return lease.owner.shown + (", which has ended" if lease.owner.lives() is False else "")


def status(
    study: Annotated[
        str | None, typer.Argument(metavar="[STUDY]", help="Name of a study (default: the one that runs).")
    ] = None,
    storage: Storage = None,
    *,
    once: Annotated[bool, typer.Option("--once", help="Say it once, also while the study runs.")] = False,
    as_json: AsJson = False,
) -> int:
    """Print the state and the findings of a study; follow its run, or its `autotune scale`, live.

    Returns:
        Exit status: 0, or 130 if the user stopped watching (143 by SIGTERM, 129 by SIGHUP).
    """
    from autotune.report import attempts, load
    from autotune.session import STUDIES, open_study
    from autotune.study.storage import database, leases, records

    if storage is not None:
        database.open_storage(storage, create=False)  # else its error would be one about the studies beside it
    opened = open_study(study or only_running(STUDIES), storage)
    name, folder, live = opened.name, opened.folder, not (once or as_json)
    pid = run_under_way(folder)
    if live and pid is None and (scaling_pid := run_under_way(folder / SCALING)):
        return _followed_scaling(name, folder, scaling_pid)
    if live and pid:
        stop = _watch("study", name, folder, pid)
        if stop is not None:
            return status_of(stop)
        pid = None
    try:
        report = opened.report
    except database.StoreError:
        if pid is None:
            raise
        data = {"name": name, "n_trials": 0, "outcomes": {}, "running": 0, "process": pid}
        plain = f"study {name}: process {pid} runs it now; no trial has ended yet"
        print(json.dumps(data, indent=1) if as_json else plain)
        return 0
    held = {lease.name: _holder(lease) for lease in leases.leases(opened.storage, name)}
    changed, edited = _changed(opened)
    report = replace(report, study={**report.study, "edited": edited})
    data = {**load.status_data(report, len(records.running(opened.study))), "process": pid}
    data |= {"held": held, "changed": changed}
    if as_json:
        print(json.dumps(data, indent=1))
        return 0
    print(fitted(lines(data)))
    print("".join(f"{what}: {who}\n" for what, who in held.items()))
    print_answer(report, [], as_json=False)
    for line in attempts.lines(report):
        print(fitted(f"note: {line}"))
    if changed:
        said = ["\nchanged since:", *(f"  {line}" for line in changed)]
        if report.picks and opened.target.exists():
            said.append(f"is the answer still right? autotune retune {name}")
        print(fitted("\n".join(said)))
    if problem := device.here().problem:
        print(fitted(f"note: {problem}"))
    return 0


def _changed(opened: OpenStudy) -> tuple[list[str], bool]:
    """What has changed since the study, or a re-tuning of it, was last looked at; and whether the target was edited since the study."""
    from autotune.retune import retuning
    from autotune.study import fingerprint

    was = fingerprint.Fingerprint.of(opened.record)
    now = fingerprint.here(opened.record, opened.target, opened.folder)
    looked_at = retuning.last_looked_at(opened.history, opened.name, opened.record)
    edited = any(c.part == "target" and c.after for c in fingerprint.changes(was, now))
    return [c.words for c in fingerprint.changes(looked_at, now)], edited


def _followed_scaling(name: str, folder: Path, pid: int) -> int:
    """Follow an `autotune scale` to its end, and name the page that it has written, if any; returns the exit status."""
    page = folder / "scaling.html"
    since = page.stat().st_mtime_ns if page.exists() else 0
    if (stop := _watch("scaling", name, folder / SCALING, pid)) is not None:
        return status_of(stop)
    written = page.exists() and page.stat().st_mtime_ns > since
    print(f"what it found: {shown(page)}" if written else "it ended without a result; its own output says why")
    return 0


def _watch(what: str, name: str, folder: Path, pid: int) -> KeyboardInterrupt | None:
    """Show a process live until it ends; returns the interrupt of a user who stopped watching before."""
    from autotune.report.progress import ProgressView

    with ProgressView() as view:
        view.say(f"{what} {name}, run by process {pid}; Ctrl-C ends the watching, not the {what}")
        try:
            follow(folder, pid, view)
        except KeyboardInterrupt as stop:
            view.say(f"the {what} goes on")
            return stop
    return None
