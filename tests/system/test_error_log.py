"""An error of autotune itself: one sentence, and the whole traceback in a file that it names."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from support.dashboard import ask, overlay_of
from support.instant import Instant, recorded

from autotune.cli import app
from autotune.report.dashboard.server import Application
from autotune.study.storage.database import in_words
from autotune.system import error_log


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path))
    return tmp_path


def raised(function, *given):
    try:
        function(*given)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def log_named_in(said):
    return Path(re.search(r"the traceback is in (\S+\.log)", said)[1]).read_text()


def test_an_error_about_a_file_whose_name_is_no_utf8_is_kept():
    said = error_log.sentence(raised(Path.read_text, Path(os.fsdecode(b"/no/\xff"))))
    assert r"\udcff" in log_named_in(said)


@pytest.mark.parametrize("kind", [KeyError, TypeError, ZeroDivisionError, AssertionError])
def test_a_command_that_errs_says_so_in_a_sentence_and_keeps_the_traceback(kind, monkeypatch, capsys):
    def err():
        raise kind("a\x1b[31mb") from ValueError("what was before")

    monkeypatch.setattr("autotune.cli.doctor.doctor", err)
    monkeypatch.setattr(sys, "argv", ["autotune", "doctor"])
    with pytest.raises(SystemExit) as ended:
        app.main()
    out, said = capsys.readouterr()
    assert (ended.value.code, out, len(said.splitlines())) == (70, "", 1)
    assert f"an error of autotune itself ({kind.__name__}" in said and "\x1b" not in said and "autotune/cli/" in said
    log = log_named_in(said)
    assert "autotune doctor" in log and "ValueError: what was before" in log and "Traceback" in log


def test_a_secret_of_the_error_is_in_neither(cache):
    said = error_log.sentence(raised(int, "password=hunter2hunter2"))
    assert "hunter2" not in log_named_in(said)


def test_where_no_file_can_be_written_the_traceback_is_printed(cache, monkeypatch, capsys):
    monkeypatch.setenv("AUTOTUNE_CACHE", os.devnull)
    assert "the traceback is above" in error_log.sentence(raised(int, "x"))
    assert "invalid literal" in capsys.readouterr().err


def test_a_user_without_a_home_folder_gets_the_traceback(monkeypatch, capsys):
    for name in ("AUTOTUNE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it returns it where there is none
    assert "the traceback is above" in error_log.sentence(raised(int, "x"))
    assert "invalid literal" in capsys.readouterr().err


def test_the_last_logs_are_kept(cache, monkeypatch):
    monkeypatch.setattr(error_log, "MOST_LOGS", 2)
    said = [error_log.keep(raised(int, text)) for text in "abc"]
    assert len(list((cache / "errors").iterdir())) == 2 and "'c'" in log_named_in(said[-1])


def test_only_what_readers_of_rows_raise_is_told_as_a_damaged_database():
    """An error of our own code stays one, also where a reader called it."""
    reader = compile("def read(f): return f()", "/x/autotune/study/storage/records.py", "exec")
    other = compile("def compute(): return {}['x']", "/x/autotune/scoring/metrics.py", "exec")
    library = compile("import json\ndef parse(): return json.loads('{')", "/x/optuna/storages/_rdb/storage.py", "exec")
    names = {}
    for code in (reader, other, library):
        exec(code, names)
    assert in_words(raised(names["read"], names["compute"])) is None
    told = in_words(raised(names["read"], names["parse"]))
    assert "holds a value that cannot be read" in str(told) and "Traceback" in log_named_in(str(told))
    assert in_words(raised(names["read"], lambda: 1 / 0)) is None


def test_the_dashboard_answers_an_error_with_the_place_of_its_traceback(tmp_path, monkeypatch):
    recorded(tmp_path / "studies", Instant(), trials=1, finalists=0).run()
    overlay = overlay_of(tmp_path / "studies")
    for name, path in (("get_all_studies", "/"), ("get_all_trials", "/api/studies/1/param_importances")):
        monkeypatch.setattr(overlay, name, {}.__getitem__)
        got = ask(Application(overlay, "127.0.0.1", None), path)
        assert got.status == 500 and "Error" in log_named_in(json.loads(got.body)["reason"])
