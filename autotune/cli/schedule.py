"""`autotune schedule`: add, list, remove, run and export schedules of re-tuning."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from autotune.errors import UserError
from autotune.retune import schedule, schedule_export
from autotune.retune.schedule import Daemon, Schedule, ScheduleError
from autotune.session import STUDIES, open_history, open_study
from autotune.study.storage import records


def schedule_add(study: str, storage: str | None, every: str | None, cron: str | None, on: str | None) -> None:
    """Add a schedule of a study (`autotune schedule add`)."""
    if on not in (None, "environment-change"):
        raise UserError(f"schedule: --on {on!r}: only environment-change is known")
    every_s, fields = schedule.rule_of(every, cron)
    opened = open_study(study, storage)
    history, _ = opened.history, opened.record  # the record shows that there is such a study
    first = schedule.next_after(every_s, fields, time.time())
    number = history.add_schedule(
        study=study, every_s=every_s, cron=fields, on_change=on is not None, next_run_at=first
    )
    added = next(Schedule.of(row) for row in history.schedules(study) if row["id"] == number)
    print(f"schedule {number}: study {study} {added.when}; first at {schedule.moment(first)}")
    print(
        "`autotune schedule run` keeps it; `autotune schedule export` writes it for cron, systemd or Kubernetes",
        file=sys.stderr,
    )


def schedule_list(storage: str | None, *, as_json: bool) -> None:
    """Print every schedule (`autotune schedule list`); a row that cannot be read is named on stderr."""
    found = []
    rows = open_history(storage or records.default_url(STUDIES)).schedules()
    for row in rows:
        try:
            found.append(Schedule.of(row))
        except ScheduleError as error:
            print(f"left out: {error}", file=sys.stderr)
    if as_json:
        print(json.dumps([each.to_data() for each in found], indent=1))
        return
    if not rows:
        print("no schedule; `autotune schedule add STUDY --every 7d` makes one", file=sys.stderr)
    for each in found:
        times = f"last {schedule.moment(each.last_run_at)}, next {schedule.moment(each.next_run_at)}"
        print(f"{each.number:>3}  {each.study}: {each.when}; {times}")


def schedule_remove(number: int, storage: str | None) -> None:
    """Remove a schedule (`autotune schedule remove`)."""
    history = open_history(storage or records.default_url(STUDIES))
    if not history.remove_schedule(number):
        known = ", ".join(str(row["id"]) for row in history.schedules())
        raise ScheduleError(f"there is no schedule {number}. " + (f"Known: {known}" if known else "There is none."))
    print(f"schedule {number} is removed")


def schedule_run(storage: str | None) -> None:
    """Run what is due until Ctrl-C or SIGTERM (`autotune schedule run`)."""
    studies = STUDIES.absolute()
    daemon = Daemon(storage or records.default_url(studies), studies, lambda text: print(text, flush=True))
    print("Ctrl-C ends it.", file=sys.stderr)
    daemon.run()


def schedule_exported(form: str, study: str | None, storage: str | None) -> None:
    """Print the schedules for another scheduler (`autotune schedule export`)."""
    history = open_history(storage or records.default_url(STUDIES))
    rows = [Schedule.of(row) for row in history.schedules(study)]
    if not rows:
        raise ScheduleError("there is no schedule to export; `autotune schedule add STUDY --every 7d` makes one")
    print(schedule_export.export(form, rows, Path.cwd(), storage), end="")
