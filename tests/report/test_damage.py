"""Commands on a damaged database: one sentence; a row that cannot be read is left out and named."""

import contextlib
import itertools
import json
import os
import shutil
import sqlite3

import pytest
from support.dashboard import ask, overlay_of
from support.instant import Instant, answered, recorded
from typer.testing import CliRunner

import autotune
from autotune.cli.app import app
from autotune.errors import UserError
from autotune.report.dashboard.server import Application
from autotune.study.storage import records
from autotune.study.storage.database import open_storage
from autotune.study.storage.history import History
from autotune.system import files

COMMANDS = (
    ["status", "s", "--once"],
    ["report", "s"],
    ["export", "s"],
    ["explain", "s"],
    ["history", "--what", "measurements"],
)
pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished study."""
    folder = tmp_path_factory.mktemp("finished") / "studies"
    recorded(folder, Instant(), trials=4, finalists=0).run()
    return folder


@pytest.fixture
def database(finished, tmp_path, monkeypatch):
    """The database of a copy of the study, and commands that run in the folder above it."""
    shutil.copytree(finished, tmp_path / "studies")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "studies" / "autotune.db"


def change(database, statement, *values):
    with sqlite3.connect(database) as connection:
        assert connection.execute(statement, values).rowcount > 0


@pytest.mark.cells(1)
@pytest.mark.parametrize("text", ["{", '"{"', '"{}"', '"[]"'], ids=["no JSON", "no JSON in it", "no fields", "a list"])
def test_a_trial_that_cannot_be_read_is_left_out_and_named(database, text):
    change(
        database,
        "update trial_system_attributes set value_json = ? where key = 'autotune:measured' and trial_id ="
        " (select trial_id from trials where number = 2)",
        text,
    )
    for command in COMMANDS:
        done = CliRunner().invoke(app, command)
        assert (done.exit_code, done.exception) == (0, None), command
    said = CliRunner().invoke(app, ["status", "s", "--once"]).stdout
    assert "trial 2 is left out: its row in the database cannot be read" in " ".join(said.split())
    assert [
        row["trial"] for row in json.loads(CliRunner().invoke(app, ["report", "s", "--json"]).stdout)["trials"]
    ] == [0, 1, 3]


@pytest.mark.parametrize("value", ["-1", '{"reason": 1', "[]"])
def test_a_decision_that_is_no_object_is_left_out_and_named(database, value):
    history = History(open_storage(records.default_url(database.parent)).engine)
    for verdict in ("unchanged", "improved"):
        history.decide("s", history.begin("s", "due"), verdict=verdict, ended_at=1.0)
    change(database, "update autotune_decision set evidence = ? where verdict = 'improved'", value)
    done = CliRunner().invoke(app, ["history", "--what", "decisions"])
    assert done.exit_code == 0 and "row 2 of study s is left out" in done.stderr and "unchanged" in done.stdout


def test_files_of_another_kind_are_named_by_a_forecast_for_a_cluster(database):
    for name in ("recommended.json", "front.json"):
        (database.parent / "s" / name).write_text('[1, {"trial": "x"}]')
    assert_refused(["project", "s"], "recommended.json is not what autotune writes there; run the study again")


def test_a_study_whose_own_values_cannot_be_read_is_refused_in_a_sentence(database):
    change(database, "update study_system_attributes set value_json = '{' where key = 'autotune:record'")
    for command in COMMANDS[:-1]:
        assert_refused(command, "cannot be read")


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5], ids=["all of it", "its tables", "its second half"])
def test_a_damaged_file_is_said_to_be_damaged(database, share):
    with sqlite3.connect(database) as connection:
        connection.execute("pragma wal_checkpoint(truncate)")
    whole = database.read_bytes()
    begin = int(share * len(whole))
    database.write_bytes(whole[:begin] + b"\xff" * (len(whole) - begin))
    for command in COMMANDS:
        assert_refused(command, "or damaged: restore a copy")


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("trials.number", "x", "the number in row"),
        ("study_directions.direction", "x", "a value of the study directions cannot be read"),
        ("trials.state", "x", "trial 2 is left out: its row"),
        ("trials.datetime_complete", -1, "trial 2 is left out: its row"),
        ("trial_params.param_value", "x", "trial 2 is left out: its row"),
        ("trial_values.value_type", "", "trial 2 is left out: its row"),
        ("studies.study_name", -1, "no study 's'"),
    ],
)
def test_python_is_told_of_a_damaged_row_in_a_sentence_too(database, column, value, words):
    table, _, name = column.partition(".")
    only = "where trial_id = (select trial_id from trials where number = 2)" if table.startswith("trial") else ""
    change(database, f'update "{table}" set "{name}" = ? {only}', value)
    try:
        said = " ".join(autotune.load_study("s").caveats)
    except UserError as error:
        said = str(error)
    assert words in said and ("restore a copy" in said or table == "studies")


def assert_refused(command, words):
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, UserError), (command, done.exception)
    assert words in str(done.exception)


# A hundred damaged states: every file of the folder, and every column of the database, garbled in turn.

READS = (
    ["status", "s", "--once"], ["report", "s"], ["export", "s"], ["explain", "s"], ["history"], ["ls", "studies"],
    ["schedule", "list"], ["history", "--what", "decisions"], ["diagnose", "s"],
)  # fmt: skip
GARBLED = {
    "empty": b"",
    "cut": None,
    "no text": b"\xff\xfe\x00\x80" * 64,
    "another kind": b"[1, {}]\n",
    "nested": b"[" * 99_999,
}
VALUES = ("{", "", -1, "x" * 10_000)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder above a finished study's, with schedule, decision and recommendation."""
    root = tmp_path_factory.mktemp("whole")
    answered(root / "studies", trials=4, finalists=0)
    history = History(open_storage(records.default_url(root / "studies")).engine)
    history.add_schedule(study="s", every_s=86400.0, cron=None, on_change=False, next_run_at=0.0)
    history.decide("s", history.begin("s", "due"), verdict="unchanged", ended_at=1.0)
    history.engine.dispose()
    with sqlite3.connect(root / "studies" / "autotune.db") as connection:
        connection.execute("pragma wal_checkpoint(truncate)")
    return root


def damaged_files(root):
    """Damages each file of a study in each way; yields what was done, and undoes it."""
    for path in sorted(
        each for each in (root / "studies").rglob("*") if each.is_file() and "autotune.db" not in each.name
    ):
        content = path.read_bytes()
        for how, text in GARBLED.items():
            path.write_bytes(content[: len(content) // 2] if text is None else text)
            yield f"{path.relative_to(root)}: {how}"
            path.write_bytes(content)


def damaged_rows(root, shift=0):
    """Puts each value into each column of the database; yields what was done, and undoes it."""
    yield from damaged_databases(
        root,
        (
            (f'update "{table}" set "{column}" = ?', (VALUES[(n + shift) % len(VALUES)],))
            for n, (table, column) in enumerate(columns_of(root))
        ),
    )


def damaged_tables(root):
    """Takes the rows of a table, or the table, out of the database; yields what was done, and undoes it."""
    tables = dict.fromkeys(table for table, _ in columns_of(root))
    yield from damaged_databases(
        root, ((f'{how} "{table}"', ()) for table in tables for how in ("delete from", "drop table"))
    )


def columns_of(root):
    with contextlib.closing(sqlite3.connect(root / "studies" / "autotune.db")) as connection:
        tables = [name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")]
        return [(table, row[1]) for table in tables for row in connection.execute(f"pragma table_info('{table}')")]


def damaged_databases(root, statements):
    """Carries out each statement on a copy of the database; yields it where it changed something."""
    database = root / "studies" / "autotune.db"
    content = database.read_bytes()
    for statement, values in statements:
        copy, changed = database.with_name("copy.db"), 0
        copy.write_bytes(content)
        with contextlib.closing(sqlite3.connect(copy)) as connection, contextlib.suppress(sqlite3.IntegrityError):
            changed = connection.execute(statement, values).rowcount
            connection.commit()
        for path in database.parent.glob("autotune.db-*"):
            path.unlink()
        os.replace(copy, database)  # another inode: commands before may have the old one open
        if changed:
            yield f"{statement} {values!r:.20}"


def tracebacks(root, states, commands=READS):
    """What was tried, and which commands ended in something else than an answer or a sentence."""
    n, found = 0, []
    for state in states:
        n += 1
        for command in commands:
            done = CliRunner().invoke(app, command)
            in_words = isinstance(done.exception, OSError) and files.words(done.exception)
            if not (in_words or isinstance(done.exception, UserError | SystemExit | None)):
                found.append((state, command, repr(done.exception)[:200]))
        try:
            autotune.load_study("s")
        except UserError:
            pass
        except Exception as error:
            found.append((state, "load_study", repr(error)[:200]))
        try:
            got = ask(Application(overlay_of(root / "studies"), "127.0.0.1", None), "/api/studies/1")
            if got.status >= 500 and b"reason" not in got.body:
                found.append((state, "dashboard", got.status))
        except UserError:
            pass
        except Exception as error:
            found.append((state, "dashboard", repr(error)[:200]))
    return n, found


@pytest.mark.timeout(900)
@pytest.mark.system
def test_no_file_or_row_that_is_damaged_ends_in_a_traceback(whole, tmp_path, monkeypatch):
    shutil.copytree(whole, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    n_files, by_files = tracebacks(tmp_path / "here", damaged_files(tmp_path / "here"))
    n_rows, by_rows = tracebacks(tmp_path / "here", damaged_rows(tmp_path / "here"))
    n_tables, by_tables = tracebacks(tmp_path / "here", damaged_tables(tmp_path / "here"))
    assert [*by_files, *by_rows, *by_tables] == [] and n_files + n_rows + n_tables >= 200


@pytest.mark.system
def test_some_damaged_files_and_rows_end_in_no_traceback(whole, tmp_path, monkeypatch):
    shutil.copytree(whole, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    some = itertools.chain(
        itertools.islice(damaged_files(tmp_path / "here"), 3, None, 31),
        itertools.islice(damaged_rows(tmp_path / "here"), 4, None, 31),
        itertools.islice(damaged_tables(tmp_path / "here"), 5, None, 31),
    )
    assert tracebacks(tmp_path / "here", some, READS[:1])[1] == []
