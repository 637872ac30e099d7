"""The commands `schedule add`, `list`, `remove`, `run` and `export`: when studies are re-tuned."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.options import AsJson, OnlyStudy, Storage, StudyName, option
from autotune.errors import UserError

if TYPE_CHECKING:
    from autotune.session import OpenStudy

HINT = "`autotune schedule add STUDY --every 7d` makes one"


def schedule_add(
    study: StudyName,
    every: Annotated[str | None, option("7d", "One run in each such interval, counted from the first run.")] = None,
    cron: Annotated[str | None, option('"0 3 * * 0"', "Five fields, as in a crontab; local time.")] = None,
    on: Annotated[str | None, option("environment-change", "Only if the environment has changed.", "--on")] = None,
    storage: Storage = None,
) -> None:
    """Add a schedule of a study, unless the same one is there."""
    from autotune.retune import schedule
    from autotune.retune.schedule import Schedule
    from autotune.session import default_storage, open_study
    from autotune.study.storage.urls import VARIABLE

    if on not in (None, "environment-change"):
        raise UserError(f"schedule: --on {on!r}: only environment-change is known")
    every_s, fields = schedule.rule_of(every, cron)
    opened = open_study(study, storage)
    history, _ = opened.history, opened.record  # the record shows that there is such a study
    opened.check_own()
    rule = {"every_s": every_s, "cron": fields, "on_change": on is not None}
    if same := next((row for row in history.schedules(study) if {name: row[name] for name in rule} == rule), None):
        print(f"schedule {same['id']} is there already: study {study} {Schedule.of(same).when}")
        return
    first = schedule.next_after(every_s, fields, time.time())
    number = history.add_schedule(study=study, next_run_at=first, **rule)
    added = next(Schedule.of(row) for row in history.schedules(study) if row["id"] == number)
    print(f"schedule {number}: study {study} {added.when}; first at {schedule.moment(first)}")
    where = "" if opened.url in (os.environ.get(VARIABLE), default_storage()) else " --storage URL"
    print(
        f"`autotune schedule run{where}` keeps it; `autotune schedule export{where}` writes it for cron, systemd or Kubernetes",
        file=sys.stderr,
    )


def schedule_list(storage: Storage = None, *, as_json: AsJson = False) -> None:
    """Print every schedule; a row that cannot be read is named on stderr."""
    from autotune.retune import schedule
    from autotune.retune.schedule import Schedule, ScheduleError
    from autotune.session import open_history

    found = []
    rows = open_history(storage).schedules()
    for row in rows:
        try:
            found.append(Schedule.of(row))
        except ScheduleError as error:
            print(f"left out: {error}", file=sys.stderr)
    if as_json:
        print(json.dumps([each.to_data() for each in found], indent=1))
        return
    if not rows:
        print(f"no schedule; {HINT}", file=sys.stderr)
    for each in found:
        times = f"last {schedule.moment(each.last_run_at)}, next {schedule.moment(each.due_at(time.time()))}"
        print(f"{each.number:>3}  {each.study}: {each.when}; {times}")


def schedule_remove(
    number: Annotated[
        int, typer.Argument(metavar="NUMBER", max=2**31 - 1, help="As `autotune schedule list` shows it.")
    ],
    storage: Storage = None,
) -> None:
    """Remove a schedule."""
    from autotune.retune.schedule import ScheduleError
    from autotune.session import open_history

    history = open_history(storage)
    for row in history.schedules():
        if row["id"] == number and (opened := _there(row["study"], storage)) is not None:
            opened.check_own()
    if not history.remove_schedule(number):
        known = ", ".join(str(row["id"]) for row in history.schedules())
        raise ScheduleError(
            f"there is no schedule {number}; known: {known}"
            if known
            else f"there is no schedule {number}, nor any other"
        )
    print(f"schedule {number} is removed")


def schedule_run(storage: Storage = None) -> None:
    """Run due re-tunings until Ctrl-C or SIGTERM."""
    from autotune.retune.schedule import Daemon
    from autotune.session import STUDIES, default_storage

    daemon = Daemon(storage or default_storage(), STUDIES.absolute(), lambda text: print(text, flush=True))
    print("Ctrl-C ends it.", file=sys.stderr)
    daemon.run()


def schedule_export(
    study: OnlyStudy = None,
    *,
    cron: Annotated[bool, typer.Option("--cron", help="Lines of a crontab.")] = False,
    systemd: Annotated[bool, typer.Option("--systemd", help="A service and a timer.")] = False,
    k8s: Annotated[bool, typer.Option("--k8s", help="A Kubernetes CronJob.")] = False,
    storage: Storage = None,
) -> None:
    """Print the schedules for another scheduler."""
    from autotune.retune import schedule_export as exporting
    from autotune.retune.schedule import Schedule, ScheduleError
    from autotune.session import open_history, open_study

    wanted = [form for form, given in (("cron", cron), ("systemd", systemd), ("k8s", k8s)) if given]
    if len(wanted) != 1:
        raise UserError("schedule export: give one of --cron, --systemd, --k8s")
    history = open_history(storage)
    rows = list[Schedule]()
    for row in map(Schedule.of, history.schedules(study)):
        if (opened := _there(row.study, storage)) is not None and not opened.is_own():
            print(f"left out: schedule {row.number}: study {row.study!r} belongs to another project", file=sys.stderr)
        else:
            rows.append(row)
    if not rows:
        if study is not None:
            _ = open_study(study, storage).study  # raises for one that is not known, and lists the studies
        raise ScheduleError(f"there is no schedule to export; {HINT}")
    n_gpus = {name: _gpus_of(name, storage, in_a_pod=k8s) for name in {row.study for row in rows}}
    print(exporting.export(wanted[0], rows, Path.cwd(), storage, n_gpus), end="")


def _there(study: str, storage: str | None) -> OpenStudy | None:
    """The study of a schedule; None if it is gone, or has no trial yet."""
    from autotune.session import open_study

    with contextlib.suppress(UserError):
        opened = open_study(study, storage)
        _ = opened.record
        return opened
    return None


def _gpus_of(study: str, storage: str | None, *, in_a_pod: bool) -> int:
    """GPUs that a node needs for the trials of a study; an error where one pod cannot run them."""
    from autotune.study.spec.yaml_file import elsewhere

    opened = _there(study, storage)
    if opened is None:
        return 0
    kept = opened.record
    if in_a_pod and (where := elsewhere(opened.folder)):
        raise UserError(
            f"schedule export: the trials of study {study!r} run {where}, and a CronJob is one pod;"
            " export --cron or --systemd for the machine that began the study"
        )
    return kept.world_size if kept.workload.environment.accelerator != "cpu" else 0
