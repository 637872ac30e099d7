"""The commands that keep an answer right, as a user types them, on a study whose trials took no time."""

import json
import shutil
import sqlite3
import threading
import time

import pytest
import sqlalchemy
from support.instant import Instant, recorded

from autotune.cli import history as history_command
from autotune.cli import retune as retune_command
from autotune.cli.app import app, schedule
from autotune.cli.history import delete
from autotune.cli.retune import changes
from autotune.cli.schedule import schedule_add, schedule_exported, schedule_list, schedule_remove
from autotune.errors import UserError
from autotune.report import files, load
from autotune.retune import fingerprint
from autotune.study import warm_start
from autotune.study.lock import study_lock
from autotune.study.storage import records
from autotune.study.storage.history import History, Measurement
from autotune.study.storage.tables import MIGRATIONS

pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat")
NOTHING = {"if_due": False, "if_stale": False, "force": False, "min_gain": 0.03, "trials": None, "on_change": None}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    runner = recorded(folder, Instant(), trials=4, objectives=["throughput"])
    runner.run()
    found = load.load("s", records.default_url(folder), folder / "s")
    list(files.write_answer(found, folder / "s"))
    warm_start.keep_recommendation(runner.storage, "s", 0, found.recommended)
    runner.storage.engine.dispose()
    return folder


@pytest.fixture(autouse=True)
def studies(finished, tmp_path, monkeypatch):
    """A working directory with that study."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(finished, tmp_path / "studies")


def known(studies):
    return History(records.open_storage(records.default_url(studies)).engine)


def retune(**options):
    return retune_command.retune("s", None, NOTHING | options, None, as_json=False)


# Schedules.


def test_a_schedule_is_added_listed_and_removed(studies, capsys):
    schedule_add("s", None, "7d", None, "environment-change")
    assert "schedule 1: study s every 7 d, if the environment has changed; first at " in capsys.readouterr().out
    schedule_list(None, as_json=True)
    (row,) = json.loads(capsys.readouterr().out)
    assert row["study"] == "s" and row["every_s"] == 7 * 86400 and 0 < row["next_run_at"] - time.time() <= 7 * 86400
    schedule_remove(1, None)
    with pytest.raises(UserError, match="there is no schedule 1"):
        schedule_remove(1, None)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: schedule_add("s", None, "7d", None, "sundays"), "only environment-change"),
        (lambda: schedule_add("other", None, "7d", None, None), "no study 'other'.*Known: s"),
        (lambda: schedule_exported("cron", None, None), "there is no schedule to export"),
        (
            lambda: retune_command.retune("s", None, NOTHING | {"if_due": True}, None, as_json=False),
            "has no schedule, so it is never due",
        ),
        (
            lambda: retune_command.retune("s", None, NOTHING | {"if_due": True, "force": True}, None, as_json=False),
            "one of --if-due",
        ),
        (lambda: retune_command.retune("other", None, NOTHING, None, as_json=False), "no study 'other'"),
        (lambda: retune_command.retune("s", None, NOTHING, None, as_json=False), "study.yaml is missing"),
        (lambda: history_command.history("s", None, "weather", 5, as_json=False), "unknown 'weather'"),
        (lambda: delete("s", None, yes=False), "autotune delete s --yes"),
    ],
)
def test_what_the_user_got_wrong_is_said_in_a_sentence(call, said):
    with pytest.raises(UserError, match=said):
        call()


def test_what_is_not_due_is_over_at_once(studies, capsys):
    schedule_add("s", None, "7d", None, None)
    assert retune(if_due=True) == 0
    assert "is not due; next: " in capsys.readouterr().err
    assert known(studies).decisions() == []


def test_what_is_due_on_a_change_waits_for_one_and_is_due_again_a_period_later(studies, capsys, monkeypatch):
    schedule_add("s", None, "7d", None, "environment-change")
    known(studies).update_schedule(1, next_run_at=0.0)
    kept = records.record(records.load_study(records.open_storage(records.default_url(studies)), "s"))
    monkeypatch.setattr(fingerprint, "here", lambda *_: fingerprint.Fingerprint.of(kept))
    assert retune(if_due=True) == 0
    assert "nothing has changed since" in capsys.readouterr().err
    assert known(studies).schedules()[0]["next_run_at"] > time.time() + 6 * 86400


def test_a_study_that_is_being_run_is_left_to_whoever_runs_it(studies, capsys):
    schedule_add("s", None, "7d", None, None)
    known(studies).update_schedule(1, next_run_at=0.0)
    with study_lock(studies / "s"):
        assert retune(if_due=True) == 0
        assert "is being run by process" in capsys.readouterr().err
        with pytest.raises(UserError, match="is being run by process"):
            retune()
    assert known(studies).schedules()[0]["next_run_at"] == 0.0  # still due


def test_a_checkpoint_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="there is no such folder"):
        retune_command.retune("s", None, NOTHING, tmp_path / "none", as_json=False)


# Changes, history, the end.


def test_what_changed_is_told_without_loading_the_model(studies, capsys):
    changes("s", None, quick=True, as_json=False)
    said = capsys.readouterr().out
    assert "device: stub, now " in said


def test_the_history_lists_every_trial_with_its_environment(studies, capsys):
    history_command.history(None, None, "measurements", 100, as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert {row["role"] for row in rows} == {"baseline", "search", "repeat"}
    assert all(row["environment"]["device_name"] == "stub" and row["study"] == "s" for row in rows)
    history_command.history("s", None, "recommendations", 100, as_json=False)
    assert "the baseline's throughput" in capsys.readouterr().out


def test_a_deleted_study_leaves_no_row_and_keeps_its_small_files(studies, capsys):
    schedule_add("s", None, "7d", None, None)
    delete("s", None, yes=True)
    with sqlite3.connect(studies / "autotune.db") as database:
        tables = [
            name
            for (name,) in database.execute(
                "select name from sqlite_master where type = 'table' and name like 'autotune_%'"
            )
        ]
        counts = {name: database.execute(f"select count(*) from {name}").fetchone()[0] for name in tables}
        assert database.execute("select count(*) from studies").fetchone() == (0,)
    assert {name for name, count in counts.items() if count} == {"autotune_migration"}
    assert (studies / "s" / "ds_config.json").exists() and not (studies / "s" / "trials").exists()


def test_rows_of_a_study_that_another_program_deleted_go_with_the_next_look(studies, capsys):
    with sqlite3.connect(studies / "autotune.db") as database:
        database.execute("delete from studies")
    history_command.history(None, None, "measurements", 10, as_json=True)
    assert json.loads(capsys.readouterr().out) == []


def test_migrations_are_applied_once_by_however_many_at_once(tmp_path):
    url = records.default_url(tmp_path / "new")
    engines = [records.open_storage(url).engine for _ in range(4)]
    threads = [threading.Thread(target=History, args=(engine,)) for engine in engines]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    with sqlite3.connect(tmp_path / "new" / "autotune.db") as database:
        assert [name for (name,) in database.execute("select name from autotune_migration order by name")] == sorted(
            MIGRATIONS
        )
    assert History(engines[0]).schedules() == []


def test_a_database_that_is_locked_for_a_moment_is_waited_for(studies):
    history = known(studies)
    lock = sqlite3.connect(studies / "autotune.db", isolation_level=None, check_same_thread=False)
    lock.execute("begin immediate")
    threading.Timer(1.0, lambda: lock.execute("commit")).start()
    row = {
        "study": "s",
        "generation": 0,
        "trial": 99,
        "role": "search",
        "environment": {"device_name": "x"},
        "structure": "",
    }
    row |= {"n_parameters": 1, "world_size": 1, "candidate": "{}", "outcome": "complete", "metrics": {}, "wall_s": 1.0}
    history.measured(Measurement(**row))
    assert history.measurements(limit=1)[0]["trial"] == 99


def test_a_measurement_is_kept_once_though_the_answer_was_lost(studies):
    history = known(studies)
    row = {
        "study": "s",
        "generation": 0,
        "trial": 99,
        "role": "search",
        "environment": {"device_name": "x"},
        "structure": "",
    }
    row |= {"n_parameters": 1, "world_size": 1, "candidate": "{}", "outcome": "complete", "metrics": {}, "wall_s": 1.0}
    one = Measurement(**row)
    for each in (one, one, Measurement(**row)):  # the last one is another measurement
        history.measured(each)
    assert sum(kept["trial"] == 99 for kept in history.measurements()) == 2


def test_what_a_run_told_and_was_killed_before_it_kept_it_is_made_up_for(studies):
    history = known(studies)
    before = [row["trial"] for row in history.measurements("s")]
    with history.engine.begin() as connection:
        connection.execute(sqlalchemy.text("delete from autotune_measurement where trial in (0, 2)"))
    recorded(studies, Instant(), trials=4, objectives=["throughput"])
    assert {0, 2} <= {row["trial"] for row in history.measurements("s") if row["role"] != "repeat"}
    recorded(studies, Instant(), trials=4, objectives=["throughput"])
    after = [row["trial"] for row in history.measurements("s") if row["role"] != "repeat"]
    assert sorted(after) == sorted(set(before))
    assert (
        next(row for row in history.measurements("s") if row["trial"] == 0 and row["role"] != "repeat")["role"]
        == "baseline"
    )


def test_every_command_of_the_schedules_has_its_own_help():
    names = {command.name for command in schedule.registered_commands}
    assert names == {"add", "list", "remove", "run", "export"} and app.registered_groups
