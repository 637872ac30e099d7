"""Schedules of re-tuning: their rules, which of them are due, and the daemon that runs them."""

import contextlib
import datetime
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apscheduler.triggers.cron import CronTrigger
from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import SQLAlchemyError

from autotune.errors import UserError
from autotune.study.lock import run_under_way
from autotune.study.spec.spec import check_name
from autotune.study.storage import database, project, records
from autotune.study.storage.history import History, Row
from autotune.study.storage.leases import Leases
from autotune.study.storage.urls import VARIABLE
from autotune.system import signals
from autotune.system.units import format_duration, parse_seconds

SHORTEST_S, LONGEST_S = 60.0, 10 * 366 * 86400.0
LONGEST_CRON = 128  # characters of the database's column
CLOCKS_APART_S = 26 * 3600.0  # of machines that share a database, at most, those of different time zones among them
LEASE = "scheduler"
# The leader gives a beat every 2 s; another daemon takes over after 5 looks without one, which is 10 s.
BEAT_S, STALE_LOOKS = 2.0, 5
NICKNAMES = {
    "@hourly": "0 * * * *", "@daily": "0 0 * * *", "@midnight": "0 0 * * *", "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *", "@yearly": "0 0 1 1 *", "@annually": "0 0 1 1 *",
}  # fmt: skip
DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
# A part of a crontab's field of weekdays: all, one, or from one to another, each or every n-th.
WEEKDAYS = re.compile(r"(?:\*|(DAY)(?:-(DAY))?)(?:/([1-9]))?".replace("DAY", "|".join(["[0-7]", *DAYS])))
RETRY_S = 300.0  # until a run that could not begin, for example because its study is being run, is tried again
RETUNE = (sys.executable, "-m", "autotune", "retune")
EXITS = {
    0: "unchanged",
    1: "failed",
    2: "could not run",
    3: "improved, the configuration is replaced",
    75: "machines or database are away; goes on next time",
    **dict.fromkeys((129, 130, 143), "interrupted; goes on next time"),
}
NOT_BEGUN = "another process has the study, so nothing is done; it is tried again"


class ScheduleError(UserError):
    """A schedule that is missing or cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When a study is re-tuned.

    Attributes:
        every_s: Seconds from one run to the next; None if `cron` is set.
        cron: Five fields, in local time.
        on_change: Whether it runs only if the environment has changed since the last run.
        last_run_at: Unix time of the last run; None before the first.
        next_run_at: Unix time of the next run, computed when the last one began.
    """

    number: int
    study: str
    every_s: float | None
    cron: str | None
    on_change: bool
    last_run_at: float | None
    next_run_at: float

    @classmethod
    def of(cls, row: Row) -> "Schedule":
        """The schedule in a row of the database.

        Raises:
            ScheduleError: The row is invalid, so another program wrote it, and it must not reach a shell.
        """
        try:
            check_name(row["study"])
            every_s, cron = row["every_s"], row["cron"]
            if every_s is not None and not 0 < float(every_s) <= LONGEST_S:
                raise ValueError(f"its interval of {every_s} s is not between 0 and ten years")
            if (every_s is None) == (cron is None):
                raise ValueError("it needs either an interval or five fields of a crontab")
            if cron is not None:
                cron = _checked_cron(cron)
            times = [float(row[name]) for name in ("last_run_at", "next_run_at") if row[name] is not None]
            if not all(map(math.isfinite, times)):
                raise ValueError("its times are no numbers")
        except (ValueError, TypeError) as error:
            raise ScheduleError(f"schedule {row['id']}: {error}; autotune schedule remove {row['id']}") from None
        names = ("study", "every_s", "on_change", "last_run_at", "next_run_at")
        return cls(number=row["id"], cron=cron, **{name: row[name] for name in names})

    def after(self, now: float) -> float:
        """The next run once one has begun, in Unix time: as it was where that took up an interrupted re-tuning before its time.

        Of an interval, it is on the grid of the runs before, without drift.
        """
        if self.due_at(now) > now:
            return self.next_run_at
        if self.every_s is None or self.next_run_at > now:
            return next_after(self.every_s, self.cron, now)
        missed = (now - self.next_run_at) // self.every_s
        return self.next_run_at + (missed + 1) * self.every_s

    def due_at(self, now: float) -> float:
        """When it is due, in Unix time: now, where a clock that was years ahead has put the next run off for longer than its rule."""
        latest = next_after(self.every_s, self.cron, now + CLOCKS_APART_S) + CLOCKS_APART_S
        return self.next_run_at if self.next_run_at <= latest else now

    @property
    def when(self) -> str:
        """The rule in words."""
        rule = f"every {format_duration(self.every_s)}" if self.every_s else f'cron "{self.cron}"'
        return rule + (", if the environment has changed" if self.on_change else "")

    def to_data(self) -> dict[str, Any]:
        """The schedule for programs."""
        return {**vars(self), "next_run_at": self.due_at(time.time())}


def rule_of(every: str | None, cron: str | None) -> tuple[float | None, str | None]:
    """Read a rule from the command line: an interval in seconds, or five fields of a crontab."""
    if (every is None) == (cron is None):
        raise ScheduleError('schedule: give one of --every 7d and --cron "0 3 * * 0"')
    if cron is not None:
        try:
            return None, _checked_cron(cron)
        except ValueError as error:
            raise ScheduleError(f'--cron "{cron}": {error}') from None
    assert every is not None
    try:
        seconds = parse_seconds(every)
    except ValueError as error:
        raise ScheduleError(f"--every: {error}") from None
    if seconds < SHORTEST_S:
        raise ScheduleError(f"--every {every}: at least a minute")
    if seconds > LONGEST_S:
        raise ScheduleError(f"--every {every}: at most ten years")
    return seconds, None


def _checked_cron(cron: str) -> str:
    """Return the five fields of a crontab, one space between them; raise ValueError if they are none."""
    fields = NICKNAMES.get(cron.strip().lower(), cron).split()
    try:
        if len(fields) != 5 or len(cron) > LONGEST_CRON:
            raise ValueError(f"{len(fields)} fields")
        trigger = _trigger(" ".join(fields))
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise ValueError(
            f'{error}; it takes minute, hour, day, month and weekday, as in "0 3 * * 0", or @daily'
        ) from None
    if fields[2] != "*" and fields[4] != "*":
        raise ValueError("give a day of the month or a weekday; both together mean different things to different crons")
    now = datetime.datetime.now().astimezone()
    # Without an end it would search for the 30th of February until the year 9999.
    trigger.end_date = now + datetime.timedelta(seconds=LONGEST_S)
    if trigger.get_next_fire_time(None, now) is None:
        raise ValueError("no such day comes within ten years; give another day of the month")
    return " ".join(fields)


def next_after(every_s: float | None, cron: str | None, now: float) -> float:
    """The first run of a rule after a moment, in Unix time; an hour that clocks show twice counts once, one left out comes an hour late."""
    if every_s is not None:
        return now + every_s
    assert cron is not None
    trigger, at = _trigger(cron), now
    wall = datetime.datetime.fromtimestamp(int(now)).replace(tzinfo=datetime.UTC)
    while at <= now:
        wall = trigger.get_next_fire_time(None, wall + datetime.timedelta(seconds=1))
        at = wall.replace(tzinfo=None).timestamp()
    return at


def _trigger(cron: str) -> CronTrigger:
    """A rule for APScheduler, of a clock on a wall that is never changed: told a zone, it passes over the day after a change.

    It counts weekdays from Monday, and crontab from Sunday (0 and 7): here they have names.
    """
    *fields, days = cron.split()
    names = days if days == "*" else ",".join(DAYS[day] for day in weekdays(cron))
    return CronTrigger.from_crontab(" ".join([*fields, names]), timezone=datetime.UTC)


def weekdays(cron: str) -> list[int]:
    """The weekdays that a rule allows, by crontab's numbers, from Sunday, which is 0."""
    allowed = set[int]()
    for part in cron.lower().split()[4].split(","):
        if (found := WEEKDAYS.fullmatch(part)) is None:
            raise ValueError(f"{part!r} is no weekday")
        first, last, step = found.groups()
        ends = first or "0", last or (first if first and not step else "6")
        start, end = (DAYS.index(day) if day in DAYS else int(day) for day in ends)
        allowed |= {day % 7 for day in range(start, end + 1 + 7 * (end < start), int(step or 1))}
    return sorted(allowed)


def due(history: History, study: str, now: float | None = None) -> list[Schedule]:
    """The schedules of a study that are due, all while a re-tuning of it is interrupted; a `ScheduleError` if it has none."""
    now = time.time() if now is None else now
    found = [Schedule.of(row) for row in history.schedules(study)]
    if not found:
        raise ScheduleError(
            f"study {study!r} has no schedule, so it is never due; `autotune schedule add {study} --every 7d` makes one"
        )
    left = history.interrupted(study) is not None
    return [schedule for schedule in found if left or schedule.due_at(now) <= now]


def started(history: History, schedules: Sequence[Schedule], now: float | None = None) -> None:
    """Note that due runs begin; one run makes up for all that were missed."""
    now = time.time() if now is None else now
    for schedule in schedules:
        history.update_schedule(schedule.number, last_run_at=now, next_run_at=schedule.after(now))


class Daemon:
    """Run what is due, in child processes; of a project's daemons on a database one leads, the others stand by.

    Args:
        command: The command that re-tunes; the study's name and `--if-due` are appended.
    """

    def __init__(self, url: str, studies: Path, say: Callable[[str], None], command: Sequence[str] = RETUNE) -> None:
        self.url, self.studies, self.say, self.command = url, studies, say, command
        with database.failing_in_words(url):
            self.storage = database.open_storage(url, create=False)
            self.history = History(self.storage.engine)
        self.lease = f"{LEASE} {project.key_of(studies)}"
        self.leases = Leases(self.history.engine, "", stale_looks=STALE_LOOKS)
        self.leads: bool | None = None  # None before the first look
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._last_run_at: dict[int, float | None] = {}  # of their schedules, before they were started
        # Until when, by a monotonic clock, a schedule is not started again.
        self._held_until: dict[int, float] = {}
        self._skipped = set[str]()  # what was said of schedules that cannot be read
        self._looked_for_left_at = -RETRY_S
        self._away = False  # whether the last look found no database

    def run(self) -> None:
        """Serve until SIGTERM or Ctrl-C; then the runs under way are stopped, and go on another time."""
        with contextlib.suppress(KeyboardInterrupt), signals.terminable():
            try:
                while True:
                    self.look()
                    time.sleep(BEAT_S)
            finally:
                for child in self._children.values():
                    with contextlib.suppress(ProcessLookupError):
                        child.terminate()
                for child in self._children.values():
                    child.wait()
                with contextlib.suppress(SQLAlchemyError, database.StoreError):
                    self.leases.give_back(self.lease)

    def look(self) -> None:
        """Give a beat or take the lead, and start what is due while leading."""
        try:
            self._reap()
            self.leases.look()
            leads = self.leases.acquire(self.lease)
            if leads != self.leads:
                self._looked_for_left_at = -RETRY_S
                self.say("this daemon leads" if leads else "another daemon leads; standing by")
            self.leads = leads
            if leads:
                self._start_due()
            self._away = False
        except (SQLAlchemyError, StorageInternalError, database.StoreError) as error:
            self.leads = None
            if not self._away:  # an outage may last for hours
                self.say(f"the database cannot be used, so nothing is started: {str(error).splitlines()[0]}")
            self._away = True

    def _start_due(self) -> None:
        now, steady = time.time(), time.monotonic()
        if looks_for_left := steady - self._looked_for_left_at >= RETRY_S:
            self._looked_for_left_at = steady
        for row in self.history.schedules():
            if row["id"] in self._children or self._held_until.get(row["id"], 0.0) > steady:
                continue
            try:
                schedule = Schedule.of(row)
            except ScheduleError as error:
                # Said once. It is not held back: SQLite gives the number of a removed schedule to the next one.
                if (said := str(error)) not in self._skipped:
                    self._skipped.add(said)
                    self.say(f"skipped: {said}")
                continue
            is_due = schedule.due_at(now) <= now or (looks_for_left and self._is_left(schedule.study))
            if is_due and self._is_own(schedule):
                self.start(schedule)

    def _is_left(self, study: str) -> bool:
        """Whether the process of a re-tuning was killed; one that outlived its daemon goes on."""
        return run_under_way(self.studies / study) is None and self.history.interrupted(study) is not None

    def _is_own(self, schedule: Schedule) -> bool:
        """Whether a schedule is this project's; that of a study which is gone is, so that its run says so."""
        with contextlib.suppress(database.StoreError):
            return project.is_own(records.load_study(self.storage, schedule.study), self.studies)
        return True

    def start(self, schedule: Schedule) -> None:
        """Start a run, which takes up an interrupted one."""
        self.say(f"{schedule.study}: re-tuning ({schedule.when})")
        self._held_until[schedule.number] = time.monotonic() + RETRY_S
        command = [*self.command, schedule.study, "--if-due"]
        environment = {**os.environ, VARIABLE: self.url}  # a password does not belong on a command line
        self._last_run_at[schedule.number] = schedule.last_run_at
        self._children[schedule.number] = subprocess.Popen(
            command, cwd=self.studies.parent, env=environment, start_new_session=True
        )

    def _reap(self) -> None:
        """Report the runs that have ended; what is due again after `RETRY_S` at the earliest did not begin."""
        ended = {number: status for number, child in self._children.items() if (status := child.poll()) is not None}
        rows = {row["id"]: row for row in self.history.schedules()} if ended else {}
        for number, status in ended.items():
            del self._children[number]
            with contextlib.suppress(KeyError, ScheduleError):  # removed, or rewritten, meanwhile
                schedule = Schedule.of(rows[number])
                if schedule.due_at(time.time()) > time.time():
                    self._held_until.pop(number, None)
                said = EXITS.get(status, f"ended with status {status}")
                began = schedule.last_run_at != self._last_run_at[number]
                self.say(f"{schedule.study}: {said if status or began else NOT_BEGUN}")


def moment(at: float | None) -> str:
    """A moment for people, in local time."""
    return "never" if at is None else datetime.datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M")
