"""Help, completion and the list of studies: quick, in groups, with defaults and answers."""

import os
import re
import shutil
import sqlite3
import subprocess
import sys

import pytest
from support.commands import called
from support.instant import answered

from autotune.cli.app import imported
from autotune.study.spec.settings import GROUPS, SETTINGS, default_words, flag

HEAVY = {"torch", "deepspeed", "optuna", "numpy", "scipy", "rich", "sqlalchemy"}
COMPLETED = {"autotune schedule ad": "add", "autotune export ": "s", "autotune run --goal thr": "throughput"}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return answered(tmp_path_factory.mktemp("finished") / "studies")


@pytest.fixture
def studies(finished, tmp_path, monkeypatch):
    """A folder with a study that has an answer."""
    monkeypatch.delenv("AUTOTUNE_STORAGE", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    shutil.copytree(finished, tmp_path / "studies")
    (tmp_path / "studies" / "s" / "study.yaml").write_text("name: s\n")
    return tmp_path


def test_options_stand_in_groups_with_their_defaults(tmp_path):
    shown = called("run", "--help", cwd=tmp_path).stdout
    heads = re.findall(r"^(\S.*):$", shown, flags=re.MULTILINE)
    assert heads == ["Arguments", *GROUPS, "Options"]
    assert (
        "TARGET [-- ARGS]" in shown
        and "(default: 30)" in shown
        and "(default: 1%)" in shown
        and "(default: 30m)" in shown
    )
    assert "Options:\n  --json" in shown
    assert re.findall(r"^(\S.*):$", called("export", "--help", cwd=tmp_path).stdout, flags=re.MULTILINE) == [
        "Arguments", "Options",
    ]  # fmt: skip


def test_the_commands_of_a_schedule_stand_in_no_group_of_others(tmp_path):
    """`schedule run` stood under `Tune`, and `schedule export` under `The answer`."""
    shown = called("schedule", "--help", cwd=tmp_path).stdout
    assert re.findall(r"^(\S.*):$", shown, flags=re.MULTILINE) == ["Options", "Commands"]


def test_every_option_of_a_study_is_in_one_group():
    grouped = [key for keys in GROUPS.values() for key in keys]
    assert sorted(grouped) == sorted(key for key, each in SETTINGS.items() if each.option and key != "script_args")


def test_a_value_that_an_option_does_not_take_is_quoted():
    with pytest.raises(Exception, match="'four'"):
        imported("run").main(["model.py", "--trials", "four"], standalone_mode=False)


def test_defaults_are_said_as_they_are_typed():
    said = {
        key: default_words(key) for key in ("trials", "patience_s", "stop_below", "branch", "overlap", "seed", "ranks")
    }
    assert said == {
        "trials": "30", "patience_s": "30m", "stop_below": "1%", "branch": "on", "overlap": "", "seed": "0", "ranks": "",
    }  # fmt: skip
    assert flag("patience_s") == "--patience"


@pytest.mark.process
def test_the_help_of_no_command_imports_anything_heavy():
    code = f"""
import sys
from autotune.cli.app import COMMANDS, imported
for path in COMMANDS:
    command = imported(path)
    with command.make_context(path, [], resilient_parsing=True) as context:
        assert command.get_help(context)
    found = {HEAVY!r}.intersection(sys.modules)
    assert not found, (path, found)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.process
def test_a_shell_completes_commands_studies_and_values(studies):
    shutil.copytree(studies / "studies", studies / "copy")
    for line, wanted in COMPLETED.items():
        environment = {
            **os.environ,
            "_AUTOTUNE_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split()) - (not line.endswith(" "))),
        }
        code = "import sys; sys.argv = ['autotune']; from autotune.cli.app import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment, cwd=studies
        )
        assert wanted in done.stdout.split(), (line, done.stdout, done.stderr)


def test_studies_are_listed_with_their_answers(studies):
    shown = called("ls", "studies", cwd=studies).stdout
    assert re.search(r"^s  micro-batch \d+ x \d+, .*ZeRO \d.*: \d\.\d\dx .*the baseline's throughput.*; 20", shown), (
        shown
    )
    assert "micro-batch" in called("history", cwd=studies).stdout


def test_studies_in_a_database_of_their_own_are_listed_without_naming_it(studies):
    """It was said that nothing has been tuned there yet, beside the studies."""
    beside = studies / "studies" / "autotune.db"
    with sqlite3.connect(beside) as database:
        database.execute("VACUUM INTO ?", (f"{studies}/of all.db",))
    for file in beside.parent.glob("autotune.db*"):
        file.unlink()
    file = studies / "studies" / "s" / "study.yaml"
    file.write_text(f"name: s\nstorage: sqlite:///{studies}/of all.db\n")
    assert called("ls", "studies", cwd=studies).stdout.startswith("s  micro-batch")
    assert "recommends trial" in called("history", cwd=studies).stdout
    file.unlink()
    assert "nothing has been tuned there yet" in called("ls", "studies", cwd=studies).stderr
