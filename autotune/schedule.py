"""When a study is re-tuned: schedules in the database, what is due, and a daemon of which one at a time leads."""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apscheduler.job import Job
from apscheduler.jobstores.base import BaseJobStore
from apscheduler.schedulers.blocking import BlockingScheduler
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger
from sqlalchemy.exc import SQLAlchemyError

from autotune import UserError, store
from autotune.history import History, Row
from autotune.lock import run_under_way
from autotune.objective import parse_seconds
from autotune.spec import check_name

SHORTEST_S, LONGEST_S = 60.0, 10 * 366 * 86400.0
# As long as the database keeps one; nobody writes a longer one by hand.
LONGEST_CRON = 128
LEASE = "scheduler"
# A leader that has not been heard of for so long, by the clock of whoever waits, has died.
BEAT_S, LEASE_S = 2.0, 10.0
# What could not begin (its study is being run) is tried again after so long.
RETRY_S = 300.0
STORAGE_VARIABLE = "AUTOTUNE_STORAGE"
RETUNE = (sys.executable, "-m", "autotune.cli", "retune")


class ScheduleError(UserError):
    """A schedule that cannot be read, or is not there."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When a study is re-tuned.

    Attributes:
        number: Its number in the database.
        study: The study.
        every_s: Seconds from one run to the next; None where `cron` says when.
        cron: Five fields, in local time.
        on_change: Only if the environment has changed since.
        last_run_at: Unix time of the last run; None before the first.
        next_run_at: Unix time of the next one, as it was worked out last.
    """

    number: int
    study: str
    every_s: float | None
    cron: str | None
    on_change: bool
    last_run_at: float | None
    next_run_at: float

    @classmethod
    def of(cls, row: Row) -> Schedule:
        """A schedule as the database holds it."""
        names = ("study", "every_s", "cron", "on_change", "last_run_at", "next_run_at")
        return cls(number=row["id"], **{name: row[name] for name in names})

    def after(self, now: float) -> float:
        """The next run after a moment."""
        return next_after(self.every_s, self.cron, now)

    def due_at(self, now: float) -> float:
        """When it is due. A clock that was ahead when the last run ended must not put the next one off for years."""
        return min(self.next_run_at, self.after(now))

    @property
    def when(self) -> str:
        """The rule for people."""
        rule = f"every {_duration(self.every_s)}" if self.every_s else f'cron "{self.cron}"'
        return rule + (", if the environment has changed" if self.on_change else "")


def rule_of(every: str | None, cron: str | None) -> tuple[float | None, str | None]:
    """A rule from flags.

    Raises:
        ScheduleError: It is none, and what one looks like.
    """
    if (every is None) == (cron is None):
        raise ScheduleError('schedule: give --every 7d or --cron "0 3 * * 0"')
    if every is not None:
        try:
            seconds = parse_seconds(every)
        except ValueError as error:
            raise ScheduleError(f"--every: {error}") from None
        if seconds < SHORTEST_S:
            raise ScheduleError(f"--every {every}: at least a minute")
        if seconds > LONGEST_S:
            raise ScheduleError(f"--every {every}: at most ten years")
        return seconds, None
    assert cron is not None
    fields = cron.split()
    try:
        if len(fields) != 5 or len(cron) > LONGEST_CRON:
            raise ValueError(f"{len(fields)} fields")
        trigger = CronTrigger.from_crontab(_days_by_name(cron))
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise ScheduleError(
            f'--cron "{cron}": {error}; it takes minute, hour, day, month and weekday, as in "0 3 * * 0"'
        ) from None
    if fields[2] != "*" and fields[4] != "*":
        raise ScheduleError(
            f'--cron "{cron}": give a day of the month or a weekday; both together mean different things to different crons'
        )
    now = datetime.datetime.now().astimezone()
    trigger.end_date = now + datetime.timedelta(
        seconds=LONGEST_S
    )  # or it would look for the 30th of February until the year 9999
    if trigger.get_next_fire_time(None, now) is None:
        raise ScheduleError(f'--cron "{cron}": no such day comes within ten years; give another day of the month')
    return None, " ".join(fields)


def next_after(every_s: float | None, cron: str | None, now: float) -> float:
    """The first moment after another that a rule means."""
    if every_s is not None:
        return now + every_s
    assert cron is not None
    found = CronTrigger.from_crontab(_days_by_name(cron)).get_next_fire_time(
        None, datetime.datetime.fromtimestamp(now + 1).astimezone()
    )
    return float(found.timestamp()) if found is not None else now + 366 * 86400.0


def _days_by_name(cron: str) -> str:
    """APScheduler counts weekdays from Monday, crontab from Sunday: 0 and 7 are Sunday there, and names mean the same in both."""
    fields = cron.split()
    names = ("sun", "mon", "tue", "wed", "thu", "fri", "sat", "sun")
    parts = []
    for part in fields[4].split(","):
        span, slash, step = part.partition("/")
        ends = [names[int(end)] if end.isdigit() and int(end) < 8 else end for end in span.split("-")]
        if ends[0] == "sun" and len(ends) == 2:  # a week of APScheduler's ends with Sunday
            parts += ["sun", f"mon-{ends[1]}"] if ends[1] != "sun" else ["*"]
        else:
            parts.append("-".join(ends) + slash + step)
    return " ".join([*fields[:4], ",".join(parts)])


def due(history: History, study: str, now: float | None = None) -> list[Schedule]:
    """The schedules of a study that are due.

    Raises:
        ScheduleError: It has none.
    """
    now = time.time() if now is None else now
    found = [Schedule.of(row) for row in history.schedules(study)]
    if not found:
        raise ScheduleError(
            f"study {study!r} has no schedule, so it is never due; `autotune schedule add {study} --every 7d` makes one"
        )
    return [schedule for schedule in found if schedule.due_at(now) <= now]


def started(history: History, schedules: Sequence[Schedule], now: float | None = None) -> None:
    """Notes that due runs begin: missed ones are made up for by one."""
    now = time.time() if now is None else now
    for schedule in schedules:
        history.update_schedule(schedule.number, last_run_at=now, next_run_at=schedule.after(now))


class Jobs(BaseJobStore):
    """The schedules of a database as APScheduler's jobs: built from plain columns, nothing is unpickled.

    Args:
        history: The database.
        fire: Runs a schedule, by its number.
    """

    def __init__(self, history: History, fire: Callable[[int], None]) -> None:
        super().__init__()
        self._history, self._fire = history, fire
        self.held: dict[int, float] = {}  # until when, by a clock that nobody moves, a schedule is left alone
        self.leads = False

    def lookup_job(self, job_id: str) -> Job | None:
        """The job of that number."""
        return next((job for job in self.get_all_jobs() if job.id == job_id), None)

    def get_due_jobs(self, now: datetime.datetime) -> list[Job]:
        """What is due; nothing while another daemon leads. However many runs were missed, each is due once."""
        if not self.leads:
            return []
        moment, steady = now.timestamp(), time.monotonic()
        return [
            self._job(s, now)
            for s in self._schedules()
            if s.due_at(moment) <= moment and self.held.get(s.number, 0.0) <= steady
        ]

    def get_next_run_time(self) -> datetime.datetime | None:
        """Never: the daemon is woken every few seconds, whatever the clock says."""
        return None

    def get_all_jobs(self) -> list[Job]:
        """Every schedule."""
        now = time.time()
        return [
            self._job(each, datetime.datetime.fromtimestamp(each.due_at(now)).astimezone())
            for each in self._schedules()
        ]

    def add_job(self, job: Job) -> None:
        """Schedules are added by `autotune schedule add`."""
        raise NotImplementedError

    def update_job(self, job: Job) -> None:
        """The run itself notes that it has begun; until then it is not offered again."""
        self.held[int(job.id)] = time.monotonic() + RETRY_S

    def remove_job(self, job_id: str) -> None:
        """Schedules are removed by `autotune schedule remove`."""

    def remove_all_jobs(self) -> None:
        """The same."""

    def _schedules(self) -> list[Schedule]:
        try:
            return [Schedule.of(row) for row in self._history.schedules()]
        except SQLAlchemyError as error:  # locked, or away for a moment: the next look will tell
            logging.getLogger(__name__).warning("the database did not answer: %s", error)
            return []

    def _job(self, schedule: Schedule, at: datetime.datetime) -> Job:
        return Job(
            self._scheduler, id=str(schedule.number), func=self._fire, args=(schedule.number,), kwargs={},
            trigger=IntervalTrigger(days=1),  # never followed: `Schedule` knows the rule
            executor="default", name=schedule.study, misfire_grace_time=None, coalesce=True, max_instances=1, next_run_time=at,
        )  # fmt: skip


class Daemon:
    """Runs what is due, one daemon of all that look at a database; another takes over when it dies.

    Args:
        url: The database.
        studies: The folder of the studies.
        say: Where lines go.
        command: What runs a study, its name and `--if-due` appended.
    """

    def __init__(self, url: str, studies: Path, say: Callable[[str], None], command: Sequence[str] = RETUNE) -> None:
        self.url, self.studies, self.say, self.command = url, studies, say, command
        with store.failing_in_words(url):
            self.history = History(store.open_storage(url, create=False).engine)
        self.owner = f"{socket.gethostname()[:24]}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.jobs = Jobs(self.history, self.fire)
        self.scheduler = BlockingScheduler(timezone=datetime.UTC, jobstores={"default": self.jobs})
        self._stop = threading.Event()
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._seen: tuple[tuple[str, int], float] | None = None
        self._told, self._took_up_at = False, -RETRY_S

    def run(self) -> None:
        """Serves until SIGTERM or Ctrl-C; what runs then is told to stop, and goes on another time."""
        logging.getLogger("apscheduler").setLevel(logging.ERROR)
        beat = threading.Thread(target=self._beat, name="autotune-lease", daemon=True)
        before = signal.signal(signal.SIGTERM, lambda *_: self._interrupt())
        beat.start()
        try:
            self.scheduler.start()
        except (KeyboardInterrupt, SystemExit):
            pass
        finally:
            signal.signal(signal.SIGTERM, before)
            self._stop.set()
            for child in list(self._children.values()):
                with contextlib.suppress(ProcessLookupError):
                    child.terminate()
            for child in list(self._children.values()):
                child.wait()
            if self.scheduler.running:
                self.scheduler.shutdown(wait=True)
            beat.join(LEASE_S)
            self._give_back()

    def fire(self, number: int) -> None:
        """Runs a schedule in a process of its own, which takes up what an earlier one left."""
        row = next((row for row in self.history.schedules() if row["id"] == number), None)
        if row is None or not self.jobs.leads or self._stop.is_set():
            return
        schedule = Schedule.of(row)
        try:
            check_name(schedule.study)  # whoever writes to the database may not say what is run here
        except ValueError as error:
            self.jobs.held[number] = math.inf
            self.say(f"schedule {number} is passed by: {error}")
            return
        self.say(f"{schedule.study}: re-tuning ({schedule.when})")
        command = [*self.command, schedule.study, "--if-due"]
        environment = {**os.environ, STORAGE_VARIABLE: self.url}  # a password does not belong on a command line
        child = subprocess.Popen(command, cwd=self.studies.parent, env=environment, start_new_session=True)
        self._children[number] = child
        try:
            status = child.wait()
        finally:
            self._children.pop(number, None)
            again = next((Schedule.of(row) for row in self.history.schedules() if row["id"] == number), None)
            if again is not None and again.due_at(time.time()) > time.time():
                self.jobs.held.pop(number, None)
        self.say(f"{schedule.study}: {EXITS.get(status, f'ended with status {status}')}")

    # Who leads

    def _beat(self) -> None:
        while not self._stop.is_set():
            try:
                self._look()
            except SQLAlchemyError as error:
                self.jobs.leads = False
                self.say(f"the database does not answer, so nothing is started: {str(error).splitlines()[0]}")
            with contextlib.suppress(Exception):  # not started yet, or shut down
                self.scheduler.wakeup()
            self._stop.wait(BEAT_S)

    def _look(self) -> None:
        """Renews the lease, or takes that of a leader who has not renewed it for some time."""
        now, held = time.monotonic(), self.history.lease(LEASE)
        if self._seen is None or self._seen[0] != held:
            self._seen = held, now
        # By this process's own steady clock: that of the leader may be wrong, or be moved.
        free = held[0] in ("", self.owner) or now - self._seen[1] > LEASE_S
        leads = free and self.history.beat(LEASE, held, self.owner)
        if leads != self.jobs.leads or not self._told:
            self._told, self._took_up_at = True, -RETRY_S
            self.say("this daemon leads" if leads else "another daemon leads; standing by")
        if leads and now - self._took_up_at >= RETRY_S:
            self._took_up_at = now
            self._take_up()
        self.jobs.leads = leads

    def _take_up(self) -> None:
        """Makes a run due again that a killed one left half done; one that outlived its daemon goes on by itself."""
        for schedule in map(Schedule.of, self.history.schedules()):
            if (
                self.history.interrupted(schedule.study) is not None
                and run_under_way(self.studies / schedule.study) is None
            ):
                self.history.update_schedule(schedule.number, next_run_at=min(schedule.next_run_at, time.time()))

    def _give_back(self) -> None:
        with contextlib.suppress(SQLAlchemyError):
            held = self.history.lease(LEASE)
            if held[0] == self.owner:
                self.history.beat(LEASE, held, "")

    def _interrupt(self) -> None:
        raise KeyboardInterrupt


EXITS = {
    0: "unchanged",
    1: "failed",
    2: "could not run",
    3: "improved, the configuration is replaced",
    130: "interrupted; goes on next time",
    143: "interrupted; goes on next time",
}


def moment(at: float | None) -> str:
    """A moment for people, in local time."""
    return "never" if at is None else datetime.datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M")


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def as_data(schedule: Schedule) -> dict[str, Any]:
    """A schedule for programs."""
    plain = {name: value for name, value in vars(schedule).items() if name != "next_run_at"}
    return {**plain, "next_run_at": schedule.due_at(time.time())}
