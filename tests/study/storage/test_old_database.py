"""A database of an earlier release opens, and works on."""

import json
import sqlite3
import time

import pytest
from optuna.trial import TrialState
from support.instant import Instant, runner_of

from autotune.report import load
from autotune.retune.schedule import Daemon, Schedule
from autotune.study.storage import optuna_tables, records
from autotune.study.storage.history import History
from autotune.study.storage.leases import Leases, Owner, StudyLeases, leases
from autotune.study.storage.tables import MIGRATIONS

pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat")
DEAD = str(Owner("elsewhere", "another kernel", 1, "0", "x"))
# The tables of leases as release 0.1 made them.
OLD_TABLES = """
    DROP TABLE autotune_leases;
    CREATE TABLE autotune_leases (study VARCHAR(256) NOT NULL, name VARCHAR(64) NOT NULL, owner VARCHAR(256) NOT NULL,
        token VARCHAR(32) NOT NULL, beat INTEGER NOT NULL, PRIMARY KEY (study, name));
    CREATE TABLE autotune_turns (study VARCHAR(256) NOT NULL, PRIMARY KEY (study));
    CREATE TABLE autotune_lease (name VARCHAR(64) NOT NULL, owner VARCHAR(64) NOT NULL, beat BIGINT NOT NULL,
        PRIMARY KEY (name));
    INSERT INTO autotune_lease VALUES ('scheduler', 'host-1-abc', 7);
    INSERT INTO autotune_turns VALUES ('s');
    DELETE FROM autotune_migration WHERE name = '0003-leases';
"""


@pytest.fixture
def old(tmp_path):
    """The database of a study of 3 trials as release 0.1 left it: killed in the fourth trial, a daemon at work."""
    runner = runner_of(tmp_path, Instant(), trials=3, finalists=0)
    runner.run()
    study, storage = runner.study, runner.storage
    record = optuna_tables.storage_of(study).get_study_system_attrs(1)[records.RECORD_ATTR]
    told = {trial.number: json.dumps(records.told_data(trial)) for trial in records.told_trials(study)}
    StudyLeases(storage, "s").claim(study)
    History(storage.engine).add_schedule(study="s", every_s=86400.0, next_run_at=0.0)
    storage.engine.dispose()
    with sqlite3.connect(tmp_path / "autotune.db") as database:
        database.executescript(OLD_TABLES)
        database.execute("INSERT INTO autotune_leases VALUES ('s', 'trial 3', ?, 't', 4)", (DEAD,))
        database.execute("DELETE FROM study_system_attributes WHERE key LIKE 'autotune:%'")
        database.execute("DELETE FROM trial_system_attributes WHERE key LIKE 'autotune:%'")
        add = "INSERT INTO {}_user_attributes ({}_id, key, value_json) VALUES (?, ?, ?)"
        database.execute(add.format("study", "study"), (1, "autotune", json.dumps(record)))
        ids = dict(database.execute("SELECT number, trial_id FROM trials"))
        for number, text in told.items():
            database.execute(add.format("trial", "trial"), (ids[number], "measured", json.dumps(text)))
    return records.default_url(tmp_path)


def tables(url):
    with sqlite3.connect(url.removeprefix(records.SQLITE)) as database:
        return {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def test_its_leases_move_into_one_table(old, tmp_path):
    assert leases(records.open_storage(old), "s")[0].trial == 3  # before anything was migrated
    engine = records.open_storage(old).engine
    History(engine)
    assert "autotune_leases" in tables(old) and not {"autotune_lease", "autotune_turns"} & tables(old)
    assert [(lease.trial, str(lease.owner)) for lease in Leases(engine, "s").held()] == [(3, DEAD)]
    with engine.connect() as connection:
        names = connection.exec_driver_sql("SELECT name FROM autotune_migration ORDER BY name").scalars().all()
    assert names == list(MIGRATIONS)


def test_its_study_is_read_and_goes_on(old, tmp_path):
    report = load.load("s", old, tmp_path / "s")
    assert len(report.trials) == 3
    executor = Instant()
    runner = runner_of(tmp_path, executor, trials=5, finalists=0)
    runner.run()
    trials = runner.study.get_trials()
    assert [t.state for t in trials].count(TrialState.RUNNING) == 0 and len(records.told_trials(runner.study)) == 5
    assert len(executor.ran) == 2  # the three are not measured again
    assert leases(runner.storage, "s") == []


def test_its_schedules_are_kept_and_led(old, tmp_path):
    begun, daemon = [], Daemon(old, tmp_path, lambda _: None)
    daemon.start = begun.append
    daemon.look()
    assert daemon.leads and [each.study for each in begun] == ["s"]
    assert Schedule.of(daemon.history.schedules()[0]).due_at(time.time()) == 0.0
