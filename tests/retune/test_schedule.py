"""Schedules: when a study is due, which daemon leads, and what a dead one leaves."""

import contextlib
import datetime
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zoneinfo
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import sqlalchemy
import tzlocal
import yaml
from apscheduler.triggers.cron import CronTrigger
from support.instant import ENVIRONMENT, WORKLOAD
from support.zoo import wait_until

from autotune.cli import schedule as commands
from autotune.errors import UserError
from autotune.executors import kubernetes
from autotune.retune import schedule, schedule_export
from autotune.retune.schedule import Daemon, Schedule, ScheduleError
from autotune.study.lock import run_under_way, study_lock
from autotune.study.storage import records
from autotune.study.storage.database import open_storage
from autotune.study.storage.history import History
from autotune.study.storage.leases import Leases, Owner
from autotune.study.storage.tables import SCHEDULE

pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat")
DAY = 86400.0
# The daemon as `autotune schedule run` starts it, in a hurry, and with a stand-in for `autotune retune`.
DAEMON = """
    import sys
    from pathlib import Path
    from autotune.retune import schedule
    schedule.BEAT_S, schedule.RETRY_S = 0.1, 0.5
    schedule.Daemon(sys.argv[1], Path(sys.argv[2]), lambda text: print(text, flush=True), [sys.executable, sys.argv[3]]).run()
"""
# Holds the study's lock, notes that it has begun, takes a moment, and writes down when it ran.
RUN = """
    import os, sys, time
    from pathlib import Path
    from autotune.errors import UserError
    from autotune.retune import schedule
    from autotune.study.lock import study_lock
    from autotune.study.storage.database import open_storage
    from autotune.study.storage.history import History
    studies = Path("studies")
    try:
        with study_lock(studies / sys.argv[1]):
            history = History(open_storage(os.environ["AUTOTUNE_STORAGE"], create=False).engine)
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
    url = records.default_url(tmp_path / "studies")
    records.create_study(open_storage(url), "s", ["minimize"], ["m"])
    return History(open_storage(url).engine)


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
    assert schedule.rule_of(None, "@daily") == (None, "0 0 * * *")


@pytest.mark.parametrize(
    ("every", "cron", "said"),
    [
        (None, None, "give one of --every 7d and --cron"),
        ("7d", "0 3 * * 0", "give one of --every 7d and --cron"),
        ("soon", None, "--every: 'soon' is not a number"),
        ("1s", None, "at least a minute"),
        (None, "0 3 * *", "4 fields"),
        (None, "61 3 * * *", "--cron"),
        (None, "0 3 1 * 1", "a day of the month or a weekday"),
        *((None, f"0 3 * * {day}", f"'{day}' is no weekday") for day in ("8", "sunday", "1-", "1-5/0", "1-2-3", "/2")),
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
        ("0 3 * * */2", (2026, 11, 22, 3, 0)),  # Sunday, Tuesday, Thursday, Saturday: APScheduler counts from Monday
        ("0 3 * * 1-5/2", (2026, 11, 23, 3, 0)),
        ("0 3 * * 2-6/3", (2026, 11, 24, 3, 0)),
        ("0 3 * * mon-fri/3", (2026, 11, 23, 3, 0)),
        ("0 3 * * 1-1", (2026, 11, 23, 3, 0)),
    ],
)
def test_the_next_run_is_the_one_that_cron_means(cron, then):
    assert schedule.next_after(None, cron, at(2026, 11, 21, 12, 0)) == at(*then)  # a Saturday


@pytest.mark.parametrize(
    ("weekday", "expected"),
    [("0-6/2", "Sun Tue Thu Sat"), ("sun-thu/2", "Sun Tue Thu"), ("0-0", "Sun"), ("sat-1", "Sun Mon Sat")],
)
def test_a_step_of_weekdays_is_not_lost_and_counts_from_sunday(weekday, expected):
    days, now = [], at(2026, 11, 21, 12, 0)
    for _ in expected.split():
        now = schedule.next_after(None, f"0 3 * * {weekday}", now)
        days.append(datetime.datetime.fromtimestamp(now).strftime("%a"))
    assert days == expected.split()


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
    found = schedule.due(history, "s", now=now)
    schedule.started(history, found, now=now)
    assert found and Schedule.of(history.schedules("s")[0]).due_at(now) == now + DAY
    # Machines whose clocks are a little apart do not run it twice.
    assert schedule.due(history, "s", now=now - 60) == [] != schedule.due(history, "s", now=now + DAY)


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


# Of a kernel whose processes nobody here can see.
ELSEWHERE = Owner("elsewhere", "another kernel", 1, "0", "x")


def elsewhere(history, tmp_path):
    """A daemon that looks to others like one on another host."""
    one = daemon(history, tmp_path)
    one.leases = Leases(history.engine, "", ELSEWHERE, schedule.STALE_LOOKS)
    return one


def test_of_two_daemons_one_leads_and_the_other_takes_over_when_it_is_silent(history, tmp_path):
    first, second = elsewhere(history, tmp_path), daemon(history, tmp_path)
    for _ in range(20):
        first.look()
        second.look()
        assert (first.leads, second.leads) == (True, False)
    for _ in range(schedule.STALE_LOOKS):
        second.look()
    assert second.leads
    first.look()  # it was only asleep
    assert not first.leads
    second.leases.give_back(second.lease)
    first.look()
    assert first.leads


def test_a_wall_clock_that_jumps_changes_nothing_about_who_leads(history, tmp_path, monkeypatch):
    first, second = elsewhere(history, tmp_path), daemon(history, tmp_path)
    first.look()
    for year in (2040, 2000):
        monkeypatch.setattr(schedule.time, "time", lambda year=year: at(year, 1, 1))
        second.look()
    assert first.leads and not second.leads


def test_a_daemon_of_this_machine_that_was_killed_is_replaced_at_once(history, tmp_path):
    dead, second = daemon(history, tmp_path), daemon(history, tmp_path)
    dead.leases = Leases(history.engine, "", replace(Owner.here(), started="1"))
    dead.look()
    second.look()
    assert dead.leads and second.leads


def test_a_retuning_that_outlived_its_daemon_is_left_alone_until_it_is_killed_too(history, tmp_path, monkeypatch):
    clock, later, every_s = [0.0], time.time() + 3 * DAY, 7 * DAY
    monkeypatch.setattr(schedule.time, "monotonic", lambda: clock[0])
    add(history, every_s=every_s, next_run_at=later)
    history.begin("s", "due")
    one, taken_up = daemon(history, tmp_path), []
    one.start = taken_up.append
    with study_lock(tmp_path / "studies" / "s"):
        one.look()
        assert one.leads and not taken_up
    one.look()
    assert not taken_up  # it is looked for once in a while
    clock[0] += schedule.RETRY_S
    one.look()
    assert taken_up == schedule.due(history, "s") != []
    schedule.started(history, taken_up)
    (row,) = history.schedules()
    assert row["last_run_at"] is not None and row["next_run_at"] == later  # the next ones stay on their grid


def test_a_database_that_does_not_answer_starts_nothing(history, tmp_path, monkeypatch):
    add(history, next_run_at=0.0)
    one, begun = daemon(history, tmp_path), []
    one.start = begun.append
    one.look()
    assert [each.number for each in begun] == [1]

    def locked(*_):
        raise sqlalchemy.exc.OperationalError("select", {}, Exception("database is locked"))

    monkeypatch.setattr(history.__class__, "_rows", locked)
    one.look()
    assert len(begun) == 1 and not one.leads


def test_a_schedule_that_replaces_one_that_cannot_be_read_runs_also_under_its_number(history, tmp_path):
    said, started = [], []
    one = Daemon(str(history.engine.url), tmp_path / "studies", said.append)
    one.start = started.append
    wrong = add(history, every_s=None, cron="every day")
    one.look()
    one.look()
    assert sum("skipped" in text for text in said) == 1 and not started
    history.remove_schedule(wrong)
    assert add(history) == wrong
    one.look()
    assert [each.number for each in started] == [wrong]


def test_a_database_that_is_away_for_long_is_said_once_and_does_not_end_the_daemon(history, tmp_path, monkeypatch):
    """A file that was moved away ended it, or was what Ctrl-C ended it with; of a server it was said every two seconds."""
    said, file = [], tmp_path / "studies" / "autotune.db"
    one = Daemon(records.default_url(tmp_path / "studies"), tmp_path / "studies", said.append)
    one.look()
    file.rename(tmp_path / "away")
    one.look()
    one.look()
    with monkeypatch.context() as stopped:
        stopped.setattr(one, "look", Mock(side_effect=KeyboardInterrupt))
        one.run()
    (tmp_path / "away").rename(file)
    one.look()
    leads, away, again = said
    assert leads == again == "this daemon leads" and "the file was removed" in away


@pytest.mark.process
def test_what_could_not_begin_is_tried_again_after_a_while(history, tmp_path, monkeypatch):
    clock, said = [0.0], []
    monkeypatch.setattr(schedule.time, "monotonic", lambda: clock[0])
    add(history, next_run_at=0.0)
    one = Daemon(str(history.engine.url), tmp_path / "studies", said.append, [sys.executable, "-c", "open('ran', 'w')"])
    ran = tmp_path / "ran"

    def looked() -> bool:
        one.look()
        for child in one._children.values():
            child.wait()
        one.look()
        found = ran.exists()
        ran.unlink(missing_ok=True)
        return found

    assert looked() and not looked()
    assert "another process has the study" in said[-1] and not any("unchanged" in text for text in said)
    clock[0] += schedule.RETRY_S
    assert looked()


def started(tmp_path):
    script, run = tmp_path / "daemon.py", tmp_path / "run.py"
    script.write_text(textwrap.dedent(DAEMON))
    run.write_text(textwrap.dedent(RUN))
    studies = tmp_path / "studies"
    command = [sys.executable, str(script), records.default_url(studies), str(studies), str(run)]
    return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)


def runs(tmp_path):
    with contextlib.suppress(FileNotFoundError):
        return [tuple(map(float, line.split())) for line in (tmp_path / "runs").read_text().splitlines()]
    return []


@pytest.mark.system
def test_daemons_that_are_killed_at_random_run_everything_once(history, tmp_path):
    """Two at a time, one of them killed after each run but the first: no two runs at once, none lost, no more than due."""
    add(history, every_s=1.0, next_run_at=0.0)
    rng = random.Random(3)
    living = [started(tmp_path), started(tmp_path)]
    began = time.monotonic()
    try:
        for n in (2, 3, 4):
            assert wait_until(lambda n=n: len(runs(tmp_path)) >= n)
            time.sleep(rng.uniform(0.0, 1.5))
            victim = living.pop(rng.randrange(2))
            victim.send_signal(signal.SIGKILL)
            victim.wait()
            living.append(started(tmp_path))
        assert wait_until(lambda: len(runs(tmp_path)) >= 5)
    finally:
        for each in living:
            each.send_signal(signal.SIGTERM)
        for each in living:
            assert each.wait(60) in (0, -signal.SIGTERM)  # the latter where it was still being started
    # A run outlives a daemon that was killed.
    assert wait_until(lambda: run_under_way(tmp_path / "studies" / "s") is None)
    took_s = time.monotonic() - began
    found = sorted(runs(tmp_path))
    assert 5 <= len(found) <= took_s / 1.0 + 1
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(found))
    # The newest may have been stopped together with its daemon; it is taken up next time.
    assert all(row["verdict"] == "unchanged" for row in history.decisions("s")[1:])


# For other schedulers.


@pytest.fixture
def two(history, monkeypatch):
    for name in (*schedule_export.NEEDED, *kubernetes.carried()):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("PATH", "/my tools/100%:/usr/bin")
    add(history, every_s=7 * DAY)
    add(history, every_s=None, cron="0 3 * * 0")
    return [Schedule.of(row) for row in history.schedules()]


def test_every_form_asks_whether_it_is_due_and_takes_an_improvement_for_no_failure(two):
    for form in schedule_export.FORMS:
        text = schedule_export.export(form, two, Path("/data/my project"), None)
        assert text.count("retune s --if-due") == 2 and schedule_export.time_zone() in text, form
    assert "SuccessExitStatus=3" in schedule_export.export("systemd", two, Path("/data"), None)
    jobs = list(yaml.safe_load_all(schedule_export.export("k8s", two, Path("/data"), None)))
    assert [job["spec"]["schedule"] for job in jobs] == ["17 3 * * *", "0 3 * * 0"]
    assert all("-eq 3" in str(job) and job["spec"]["timeZone"] == schedule_export.time_zone() for job in jobs)


def test_every_schedule_has_a_name_of_its_own_also_where_the_names_of_studies_are_long_or_much_alike():
    studies = ("a.b", "a_b", "A-b", "a-2", "a", "a", "2-a", "x" * 60 + "1", "x" * 60 + "2")
    rows = [Schedule.of({**Kept(7 * DAY, 0.0).row, "id": n, "study": name}) for n, name in enumerate(studies, start=1)]
    jobs = list(yaml.safe_load_all(schedule_export.export("k8s", rows, Path("/data"), None)))
    names = {job["metadata"]["name"] for job in jobs}
    assert len(names) == len(rows) and all(re.fullmatch("[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?", name) for name in names)
    services = re.findall(r"^# \S+/(\S+)\.service$", schedule_export.export("systemd", rows, Path("/data"), None), re.M)
    assert len(set(services)) == len(rows) == len(services)


@pytest.mark.parametrize(
    ("cron", "plain"),
    [
        ("0 3 * * 7", "0 3 * * 0"),
        ("0 3 * * 5-7", "0 3 * * 0,5,6"),
        ("0 3 * * 7-2", "0 3 * * 0,1,2"),
        ("0 3 * * mon-fri", "0 3 * * 1,2,3,4,5"),
        ("0 3 last * *", "0 3 * * *"),
        ("5/10 1-15/2 * jan *", "5-59/10 1-15/2 * jan *"),
        ("*/5 * 1,15 * *", "*/5 * 1,15 * *"),
    ],
)
def test_what_not_every_cron_knows_is_written_otherwise_and_asks_whenever_the_rule_is_due(cron, plain):
    """Kubernetes refuses the weekday 7, and no crontab has the `last` day that APScheduler takes."""
    _, kept = schedule.rule_of(None, cron)
    row = {**Kept(DAY, 0.0).row, "every_s": None, "cron": kept}
    (job,) = yaml.safe_load_all(schedule_export.export("k8s", [Schedule.of(row)], Path("/data"), None))
    assert job["spec"]["schedule"] == plain
    assert f"\n{plain} cd " in schedule_export.export("cron", [Schedule.of(row)], Path("/data"), None)
    asked, now = schedule.rule_of(None, plain)[1], at(2026, 1, 20)
    for _ in range(20):  # what runs is asked for at the same minute
        now = schedule.next_after(None, kept, now)
        assert schedule.next_after(None, asked, now - 60.0) == now


@pytest.mark.parametrize(
    ("name", "forms"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", ("cron", "systemd", "k8s")),
        ("NCCL_P2P_DISABLE", ("cron", "systemd", "k8s")),
        ("PYTHONPATH", ("cron", "systemd")),
        ("HF_TOKEN", ()),
    ],
)
def test_what_changes_measurements_or_finds_modules_is_set_as_it_was_for_the_study(two, monkeypatch, name, forms):
    """A trial without its allocator needs more memory, and one without its network's settings is slower, or hangs."""
    monkeypatch.setenv(name, "a_value:True")
    for form in schedule_export.FORMS:
        text = schedule_export.export(form, two, Path("/data"), None)
        assert text.count(name) == text.count("a_value:True") == 2 * (form in forms), form


def test_folder_and_environment_are_quoted_for_each_scheduler(two):
    folder = Path("/data/my 10% project")
    text = schedule_export.export("cron", two, folder, None)
    assert "0 3 * * 0 cd '/data/my 10\\% project' && env 'PATH=/my tools/100\\%:/usr/bin' OMP_NUM_THREADS=3 " in text
    text = schedule_export.export("systemd", two, folder, None)
    assert "WorkingDirectory=/data/my 10%% project\n" in text and 'Environment="OMP_NUM_THREADS=3"\n' in text
    assert 'Environment="PATH=/my tools/100%%:/usr/bin"\n' in text
    for form in schedule_export.FORMS:
        with pytest.raises(UserError, match="cannot be written into a schedule"):
            schedule_export.export(form, two, Path("/data/x\n* * * * * touch pwned"), None)


@pytest.mark.parametrize(("accelerator", "n_gpus"), [("cuda", 2), ("cpu", 0)])
def test_a_pod_needs_a_gpu_for_each_rank_of_a_study_on_gpus(tmp_path, monkeypatch, accelerator, n_gpus):
    """It asked one pod for the GPUs of several machines."""
    workload = replace(WORKLOAD, environment=replace(ENVIRONMENT, accelerator=accelerator))
    kept = SimpleNamespace(record=SimpleNamespace(world_size=2, workload=workload), folder=tmp_path)
    monkeypatch.setattr("autotune.session.open_study", lambda *_: kept)
    assert commands._gpus_of("s", None, in_a_pod=True) == n_gpus
    for stated, said in {"nodes: 2": "on 2 machines", "executor: slurm": "on slurm"}.items():
        (tmp_path / "study.yaml").write_text(stated)
        assert commands._gpus_of("s", None, in_a_pod=False) == n_gpus
        with pytest.raises(UserError, match=f"run {said}, and a CronJob is one pod"):
            commands._gpus_of("s", None, in_a_pod=True)


@pytest.mark.parametrize("n_gpus", [0, 4])
def test_a_pod_gets_the_gpus_of_the_study_its_variables_and_shared_memory(two, n_gpus):
    job = next(yaml.safe_load_all(schedule_export.export("k8s", two, Path("/data"), None, {"s": n_gpus})))
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    limits = {"limits": {"nvidia.com/gpu": 4}} if n_gpus else None
    assert container.get("resources") == limits
    assert {each["name"]: each["value"] for each in container["env"]} == {
        "OMP_NUM_THREADS": "3", "AUTOTUNE_CACHE": "/project/.cache/autotune",
    }  # fmt: skip
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]


@pytest.mark.parametrize(
    ("every_s", "asks"),
    [(600.0, "*/10 * * * *"), (3600.0, "17 * * * *"), (1.5 * DAY, "17 * * * *"), (2 * DAY, "17 3 * * *")],
)
def test_an_interval_keeps_its_grid_however_late_it_is_asked_for(history, every_s, asks):
    number = add(history, every_s=every_s, next_run_at=1000.0)
    for n in range(5):
        (due,) = schedule.due(history, "s", now=1000.0 + n * every_s + 500.0)
        schedule.started(history, [due], now=1000.0 + n * every_s + 500.0)
    (row,) = history.schedules()
    assert row["id"] == number and row["next_run_at"] == 1000.0 + 5 * every_s
    assert f"\n{asks} cd " in schedule_export.export("cron", [Schedule.of(row)], Path("/data"), None)


class Kept:
    """Schedules without a database."""

    def __init__(self, every_s, began):
        self.row = {"id": 1, "study": "s", "every_s": every_s, "cron": None, "on_change": False, "last_run_at": None}
        self.row["next_run_at"] = began + every_s

    def schedules(self, _study=None):
        return [self.row]

    def update_schedule(self, _number, **changes):
        self.row |= changes

    def interrupted(self, _study):
        return None


# The expressions of systemd that exports use, as fields of a crontab.
HOURLY, DAILY = "0 * * * *", "0 0 * * *"


GRIDS = [
    *((every_s, "UTC") for every_s in (2700.0, 5 * 3600.0)),
    *((36 * 3600.0, zone) for zone in ("Europe/Berlin", "Australia/Lord_Howe")),
    *((every_s, "UTC") for every_s in (3600.0, 36 * 3600.0, 2 * DAY, 7 * DAY, 30 * DAY)),
    *itertools.product((3600.0, 7 * DAY), ("Europe/Berlin", "America/New_York", "Australia/Lord_Howe")),
    (36 * 3600.0, "America/New_York"),
]


@pytest.mark.cells(8)
@pytest.mark.parametrize("form", ["cron", "systemd"])
@pytest.mark.parametrize(("every_s", "zone"), GRIDS)
def test_over_120_days_every_run_is_within_one_asking_interval_of_the_grid(every_s, zone, form):
    began = datetime.datetime(2026, 2, 10, tzinfo=datetime.UTC).timestamp()  # clocks change in each of the zones
    history, rng, now, ran = Kept(every_s, began), random.Random(int(every_s)), began, []
    job = schedule_export.Job(Schedule.of(history.row), "s", "/", 0)
    asks = job.fields
    if form == "systemd":
        minutes = job.on_calendar.removeprefix("*:0/")
        asks = {"hourly": HOURLY, "daily": DAILY}.get(minutes, f"*/{minutes} * * * *")
    local = zoneinfo.ZoneInfo(zone)
    asking = CronTrigger.from_crontab(asks, timezone=local)
    longest_s, before = 0.0, None
    while now < began + 120 * DAY:
        now = asking.get_next_fire_time(None, datetime.datetime.fromtimestamp(now + 1, local)).timestamp()
        longest_s, before = max(longest_s, now - before if before is not None else 0.0), now
        late = now + rng.uniform(0.0, 600.0)  # the machine was busy
        if found := schedule.due(history, "s", now=late):
            schedule.started(history, found, now=late)
            ran.append(late - began)
    assert abs(len(ran) * every_s - 120 * DAY) <= every_s
    assert all(0 <= at - every_s * n <= longest_s + 600.0 for n, at in enumerate(ran, 1))


@pytest.fixture
def zone_of(monkeypatch):
    """Sets the local time zone."""

    def choose(zone):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        tzlocal.reload_localzone()

    yield choose
    monkeypatch.undo()
    time.tzset()
    tzlocal.reload_localzone()


@pytest.mark.parametrize("cron", ["0 0 * * *", "30 2 * * *", "0 3 * * *", "59 23 * * *"])
@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata"])
def test_a_daily_rule_runs_once_each_day_over_both_changes_of_the_clocks(zone_of, zone, cron):
    zone_of(zone)
    now, days = at(2026, 1, 1) - 0.5, []  # within a second of a run that one was left out
    while len(days) < 365:
        now = schedule.next_after(None, cron, now)
        days.append(datetime.datetime.fromtimestamp(now).date())
    assert days == [datetime.date(2026, 1, 1) + datetime.timedelta(n) for n in range(365)]
    april = schedule.next_after(None, "0 0 1 * *", at(2026, 3, 1))  # @monthly had none in April
    assert datetime.datetime.fromtimestamp(april).date() == datetime.date(2026, 4, 1)


def test_what_a_machine_of_another_zone_has_scheduled_is_not_due_at_once(history, zone_of):
    zone_of("UTC")
    now = at(2026, 3, 5)
    for cron in ("0 0 * * *", "0 3 * * 0"):
        add(history, every_s=None, cron=cron, next_run_at=schedule.next_after(None, cron, now))
    zone_of("Asia/Tokyo")
    assert schedule.due(history, "s", now=now) == []


def test_what_cron_would_cut_is_refused(two, monkeypatch):
    monkeypatch.setenv("PATH", ":".join(["/usr/bin", *(["/usr/local/bin"] * 100)]))
    for line in schedule_export.export("cron", two, Path("/data"), None).splitlines():
        assert "PATH=/usr/bin:/usr/local/bin " in line or line.startswith("#")  # each folder once
    monkeypatch.setenv("PATH", ":".join(f"/opt/modules/compiler/{n:04}/bin" for n in range(40)))
    with pytest.raises(UserError, match="cron takes at most 998"):
        schedule_export.export("cron", two, Path("/data"), None)
    assert "compiler/0039" in schedule_export.export("systemd", two, Path("/data"), None)


@pytest.mark.process
@pytest.mark.parametrize("rule", [(600.0, None), (3600.0, None), (7 * DAY, None), (None, "*/5 1-3 1,15 * *")])
def test_units_are_what_systemd_takes(history, tmp_path, monkeypatch, rule):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    monkeypatch.setenv("PATH", f'/my tools/100%:/a"b:{os.environ["PATH"]}')
    add(history, every_s=rule[0], cron=rule[1])
    folder = tmp_path / "my 10% $p \"q\" 'x'"
    folder.mkdir()
    text = schedule_export.export("systemd", [Schedule.of(row) for row in history.schedules()], folder, None)
    _, *parts = re.split(r"^# ~/\.config/systemd/user/(\S+)\n", text, flags=re.MULTILINE)
    units = dict(zip(parts[::2], parts[1::2], strict=True))
    for name, unit in units.items():
        (tmp_path / name).write_text(unit)
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    own = [line for line in checked.stderr.splitlines() if "autotune-" in line or "retune" in line]
    assert (checked.returncode, own) == (0, [])
    (when,) = re.findall("OnCalendar=(.*)", text)
    assert subprocess.run(["systemd-analyze", "calendar", when], capture_output=True, check=False).returncode == 0


@pytest.mark.system
@pytest.mark.parametrize(
    "rule", [(600.0, None), (7 * DAY, None), (None, "*/5 1-3 1,15 * *"), (None, "30 4 * jan-mar mon")]
)
def test_lines_are_what_cron_takes(history, tmp_path, rule):
    if shutil.which("crontab") is None:
        pytest.skip("cron is not installed: apt-get install cron")
    usage = subprocess.run(["crontab", "--help"], capture_output=True, text=True, check=False).stderr
    add(history, every_s=rule[0], cron=rule[1])
    text = schedule_export.export("cron", [Schedule.of(row) for row in history.schedules()], tmp_path / "a 10%", None)
    (tmp_path / "tab").write_text(text)
    checked = subprocess.run(
        ["crontab", "-T" if "-T" in usage else "-n", "tab"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.system
def test_a_cron_job_is_what_the_published_model_takes(two):
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed: pip install -e '.[dev]'"
    )
    for job in yaml.safe_load_all(schedule_export.export("k8s", two, Path("/data"), None, {"s": 4})):
        read = models.IoK8sApiBatchV1CronJob.from_dict(job).to_dict()
        assert json.loads(json.dumps(read, default=str)) == job  # no key is unknown to it


def test_a_password_is_not_exported(two):
    for form in schedule_export.FORMS:
        assert "secret" not in schedule_export.export(form, two, Path("/data"), "postgresql://me:secret@host/db")


@pytest.mark.parametrize(
    "values",
    [
        {"every_s": None, "cron": "0 3 * * 0\n* * * * * touch pwned"},
        {"every_s": None, "cron": '0 3 * * 0" && touch pwned #'},
        {"every_s": None, "cron": "0 3 * * $(touch)"},
        {"every_s": None, "cron": None},
        {"every_s": float("inf")},
        {"study": "s\n* * * * * touch pwned"},
    ],
)
def test_a_row_that_no_command_wrote_is_not_exported(history, values, capsys):
    row = {"study": "s", "every_s": DAY, "cron": None, "on_change": False, "created_at": 0.0, "next_run_at": 0.0}
    with history.engine.begin() as connection:
        connection.execute(SCHEDULE.insert().values(row | values))
    url = str(history.engine.url)
    for form in schedule_export.FORMS:
        with pytest.raises(ScheduleError, match="autotune schedule remove 1"):
            commands.schedule_export(storage=url, **{form: True})
    commands.schedule_list(url)
    assert "pwned" not in capsys.readouterr().out


def test_a_field_over_two_lines_becomes_one(history):
    with history.engine.begin() as connection:
        row = {"study": "s", "cron": "0 3\n* * 0", "on_change": False, "created_at": 0.0, "next_run_at": 0.0}
        connection.execute(SCHEDULE.insert().values(row))
    assert Schedule.of(history.schedules()[0]).cron == "0 3 * * 0"
