"""Schedules: when a study is due, which daemon leads, and what a dead one leaves."""

import contextlib
import datetime
import itertools
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import sqlalchemy
import yaml

from autotune import schedule, schedule_export, store
from autotune.history import History
from autotune.lock import study_lock
from autotune.schedule import Daemon, Schedule, ScheduleError

pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat")
DAY = 86400.0
# The daemon as `autotune schedule run` starts it, in a hurry, and with a stand-in for `autotune retune`.
DAEMON = """
    import sys
    from pathlib import Path
    from autotune import schedule
    schedule.BEAT_S, schedule.LEASE_S, schedule.RETRY_S = 0.1, 1.0, 0.5
    schedule.Daemon(sys.argv[1], Path(sys.argv[2]), lambda text: print(text, flush=True), [sys.executable, sys.argv[3]]).run()
"""
# Holds the study's lock, notes that it has begun, takes a moment, and writes down when it ran.
RUN = """
    import os, sys, time
    from pathlib import Path
    from autotune import UserError, schedule, store
    from autotune.history import History
    from autotune.lock import study_lock
    studies = Path("studies")
    try:
        with study_lock(studies / sys.argv[1]):
            history = History(store.open_storage(os.environ["AUTOTUNE_STORAGE"], create=False).engine)
            found = schedule.due(history, sys.argv[1])
            left = history.interrupted(sys.argv[1])
            if found or left:
                schedule.started(history, found)
                number = left["id"] if left else history.begin(sys.argv[1], "due")
                began = time.time()
                time.sleep(0.3)
                history.decide(sys.argv[1], number, verdict="unchanged", ended_at=time.time())
                with open("runs", "a") as file:
                    file.write(f"{began} {time.time()}\\n")
    except UserError:
        pass
"""


@pytest.fixture
def history(tmp_path):
    url = store.default_url(tmp_path / "studies")
    store.create_study(store.open_storage(url), "s", ["minimize"], ["m"])
    return History(store.open_storage(url).engine)


def add(history, **values):
    given = {"study": "s", "every_s": DAY, "cron": None, "on_change": False, "next_run_at": 0.0} | values
    return history.add_schedule(**given)


def at(*moment):
    return datetime.datetime(*moment).astimezone().timestamp()


# Rules.


def test_an_interval_or_five_fields_of_a_crontab():
    assert schedule.rule_of("7d", None) == (7 * DAY, None)
    assert schedule.rule_of("2w", None) == (14 * DAY, None)
    assert schedule.rule_of(None, "0 3  * * 0") == (None, "0 3 * * 0")


@pytest.mark.parametrize(
    ("every", "cron", "said"),
    [
        (None, None, "give --every 7d or --cron"),
        ("7d", "0 3 * * 0", "give --every 7d or --cron"),
        ("soon", None, "--every: 'soon' is not a number"),
        ("1s", None, "at least a minute"),
        (None, "0 3 * *", "4 fields"),
        (None, "61 3 * * *", "--cron"),
        (None, "0 3 1 * 1", "a day of the month or a weekday"),
    ],
)
def test_what_is_no_rule_is_refused_in_words(every, cron, said):
    with pytest.raises(ScheduleError, match=said):
        schedule.rule_of(every, cron)


@pytest.mark.parametrize(
    ("cron", "then"),
    [
        ("0 3 * * 0", (2026, 11, 22, 3, 0)),  # Sunday, as crontab counts
        ("0 3 * * 7", (2026, 11, 22, 3, 0)),
        ("30 4 * * 1-5", (2026, 11, 23, 4, 30)),
        ("0 3 * * sat", (2026, 11, 28, 3, 0)),
        ("15 * * * *", (2026, 11, 21, 12, 15)),
        ("0 0 1 * *", (2026, 12, 1, 0, 0)),
        ("0 1 * * 0-2", (2026, 11, 22, 1, 0)),
    ],
)
def test_the_next_run_is_the_one_that_cron_means(cron, then):
    assert schedule.next_after(None, cron, at(2026, 11, 21, 12, 0)) == at(*then)  # a Saturday


# What is due.


def test_missed_runs_are_made_up_for_by_one(history):
    add(history, next_run_at=1000.0)
    found = schedule.due(history, "s", now=1000.0 + 30 * DAY)
    assert len(found) == 1
    schedule.started(history, found, now=1000.0 + 30 * DAY)
    assert schedule.due(history, "s", now=1000.0 + 30 * DAY + 1) == []
    assert len(schedule.due(history, "s", now=1000.0 + 31 * DAY)) == 1


def test_a_clock_that_was_years_ahead_does_not_put_the_next_run_off_for_years(history):
    add(history, next_run_at=at(2040, 1, 1))
    now = at(2026, 11, 21)
    assert schedule.due(history, "s", now=now) == []
    assert Schedule.of(history.schedules("s")[0]).due_at(now) == now + DAY


def test_a_study_without_a_schedule_is_told_so(history):
    with pytest.raises(ScheduleError, match="autotune schedule add s --every 7d"):
        schedule.due(history, "s")


def test_a_schedule_of_a_study_that_is_not_there_is_refused(history):
    with pytest.raises(Exception, match="is gone"):
        add(history, study="other")
    assert history.schedules("other") == []


# Who leads.


def daemon(history, tmp_path):
    return Daemon(str(history.engine.url), tmp_path / "studies", lambda _: None)


def test_of_two_daemons_one_leads_and_the_other_takes_over_when_it_is_silent(history, tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(schedule.time, "monotonic", lambda: clock[0])
    first, second = daemon(history, tmp_path), daemon(history, tmp_path)
    for _ in range(20):
        first._look()
        second._look()
        clock[0] += schedule.BEAT_S
        assert (first.jobs.leads, second.jobs.leads) == (True, False)
    clock[0] += schedule.LEASE_S + schedule.BEAT_S
    second._look()
    assert second.jobs.leads
    first._look()  # it was only asleep
    assert not first.jobs.leads
    second._give_back()
    first._look()
    assert first.jobs.leads


def test_a_wall_clock_that_jumps_changes_nothing_about_who_leads(history, tmp_path, monkeypatch):
    first, second = daemon(history, tmp_path), daemon(history, tmp_path)
    first._look()
    monkeypatch.setattr(schedule.time, "time", lambda: at(2040, 1, 1))
    second._look()
    monkeypatch.setattr(schedule.time, "time", lambda: at(2000, 1, 1))
    second._look()
    assert first.jobs.leads and not second.jobs.leads


def test_a_retuning_that_outlived_its_daemon_is_left_alone_until_it_is_killed_too(history, tmp_path, monkeypatch):
    clock, later = [0.0], at(2040, 1, 1)
    monkeypatch.setattr(schedule.time, "monotonic", lambda: clock[0])
    add(history, next_run_at=later)
    history.begin("s", "due")
    one = daemon(history, tmp_path)
    with study_lock(tmp_path / "studies" / "s"):
        one._look()
        assert one.jobs.leads and history.schedules()[0]["next_run_at"] == later
    one._look()
    assert history.schedules()[0]["next_run_at"] == later  # it is looked for once in a while
    clock[0] += schedule.RETRY_S
    one._look()
    assert history.schedules()[0]["next_run_at"] < later


def test_a_database_that_does_not_answer_starts_nothing(history, tmp_path, monkeypatch):
    add(history, next_run_at=0.0)
    one = daemon(history, tmp_path)
    one._look()

    def locked(*_):
        raise sqlalchemy.exc.OperationalError("select", {}, Exception("database is locked"))

    now = datetime.datetime.now().astimezone()
    one.jobs._scheduler = one.scheduler
    assert len(one.jobs.get_due_jobs(now)) == 1
    monkeypatch.setattr(history.__class__, "_rows", locked)
    assert one.jobs.get_due_jobs(now) == []


def started(tmp_path):
    script, run = tmp_path / "daemon.py", tmp_path / "run.py"
    script.write_text(textwrap.dedent(DAEMON))
    run.write_text(textwrap.dedent(RUN))
    command = [
        sys.executable,
        str(script),
        store.default_url(tmp_path / "studies"),
        str(tmp_path / "studies"),
        str(run),
    ]
    return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)


def runs(tmp_path):
    with contextlib.suppress(FileNotFoundError):
        return [tuple(map(float, line.split())) for line in (tmp_path / "runs").read_text().splitlines()]
    return []


@pytest.mark.slow
def test_daemons_that_are_killed_at_random_run_everything_once(history, tmp_path):
    """Two at a time, one of them killed every other second: no two runs at once, none lost, and no more than were due."""
    add(history, every_s=1.0, next_run_at=0.0)
    rng = random.Random(3)
    living = [started(tmp_path), started(tmp_path)]
    began = time.monotonic()
    try:
        while time.monotonic() - began < 60 and len(runs(tmp_path)) < 4:
            time.sleep(rng.uniform(1.0, 2.5))
            if len(runs(tmp_path)) > 1:
                victim = living.pop(rng.randrange(2))
                victim.send_signal(signal.SIGKILL)
                victim.wait()
                living.append(started(tmp_path))
    finally:
        for each in living:
            each.send_signal(signal.SIGTERM)
        for each in living:
            assert each.wait(20) in (0, -signal.SIGTERM)  # the latter where it was still being started
    time.sleep(0.5)  # a run outlives a daemon that was killed
    took_s = time.monotonic() - began
    found = sorted(runs(tmp_path))
    assert 4 <= len(found) <= took_s / 1.0 + 1
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(found))
    # The newest may have been stopped together with its daemon; it is taken up next time.
    assert all(row["verdict"] == "unchanged" for row in history.decisions("s")[1:])


# For other schedulers.


@pytest.fixture
def two(history):
    add(history, every_s=7 * DAY)
    add(history, every_s=None, cron="0 3 * * 0")
    return [Schedule.of(row) for row in history.schedules()]


def test_every_form_asks_whether_it_is_due_and_takes_an_improvement_for_no_failure(two):
    for form in schedule_export.FORMS:
        text = schedule_export.export(form, two, Path("/data/my project"), None)
        assert text.count("retune s --if-due") == 2, form
        if form in ("k8s", "github"):
            assert all(list(yaml.safe_load_all(text)))
            assert "-eq 3" in text
    assert "SuccessExitStatus=3" in schedule_export.export("systemd", two, Path("/data"), None)


def test_a_crontab_line_quotes_the_folder(two):
    assert "0 3 * * 0 cd '/data/my project' && " in schedule_export.export("cron", two, Path("/data/my project"), None)


def test_a_password_is_not_exported(two):
    for form in schedule_export.FORMS:
        assert "secret" not in schedule_export.export(form, two, Path("/data"), "postgresql://me:secret@host/db")
