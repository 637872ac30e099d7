"""Commands on a damaged database: one sentence; a row that cannot be read is left out and named."""

import json
import sqlite3

import pytest
from support.instant import Instant, recorded
from typer.testing import CliRunner

from autotune.cli.app import app
from autotune.errors import UserError

COMMANDS = (
    ["status", "s", "--once"],
    ["report", "s"],
    ["export", "s"],
    ["explain", "s"],
    ["history", "--what", "measurements"],
)
pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat")


@pytest.fixture
def database(tmp_path, monkeypatch):
    """The database of a finished study, and commands that run in the folder above it."""
    recorded(tmp_path / "studies", Instant(), trials=4, finalists=0).run()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "studies" / "autotune.db"


def change(database, statement, *values):
    with sqlite3.connect(database) as connection:
        assert connection.execute(statement, values).rowcount > 0


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


def test_a_row_of_the_history_that_cannot_be_read_is_left_out_and_named(database):
    change(database, "update autotune_measurement set metrics = '{' where id = 2")
    done = CliRunner().invoke(app, COMMANDS[-1])
    assert done.exit_code == 0 and "row 2 of study s is left out" in done.stderr and "trial 3" in done.stdout


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


def assert_refused(command, words):
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, UserError), (command, done.exception)
    assert words in str(done.exception)
