"""The folder for a trial's temporary files."""

import importlib
import os
import sys
import tempfile

from autotune.system import processes
from autotune.system import temporary as names
from autotune.worker import project
from autotune.worker.agent import temporary


def test_a_folder_in_which_sockets_would_have_too_long_a_path_is_not_made(tmp_path, monkeypatch):
    long = tmp_path / ("x" * temporary.MAX_PATH_BYTES)
    long.mkdir()
    for place in (long, tmp_path / "missing"):
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        assert temporary.make_folder() is None
    assert list(long.iterdir()) == [] and temporary.environment(None) == {}


def test_a_cache_that_the_user_has_moved_stays_there(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it when it is asked for the folder
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "/data/tokens")
    assert temporary.environment(tmp_path / "t").keys() == {"TMPDIR", "TORCHINDUCTOR_CACHE_DIR"}


def test_a_rank_leaves_the_names_of_the_libraries_that_it_imported_and_not_of_the_users_modules(tmp_path, monkeypatch):
    monkeypatch.setattr(project, "_roots", [])
    project.settle(tmp_path / "project" / "train.py")
    (own := tmp_path / f"{names.PREFIX}1").mkdir()
    monkeypatch.setenv("TMPDIR", str(own))
    for folder, name in (("project", "of_the_user"), ("library", "of_a_library")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.py").write_text("")
        monkeypatch.syspath_prepend(tmp_path / folder)
    imported = [importlib.import_module(name) for name in ("of_the_user", "of_a_library")]
    for rank, left in (("1", []), ("0", ["of_a_library"])):
        monkeypatch.setenv("LOCAL_RANK", rank)
        temporary.note_imports(imported)
        assert temporary.noted_imports(own) == left
    assert temporary.noted_imports(None) == temporary.noted_imports(tmp_path / "nowhere") == []
    (own / temporary.IMPORTS).unlink()
    with monkeypatch.context() as changed:  # the server would import the library without it
        changed.setenv("HF_HOME", "/data")
        temporary.note_imports(imported)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # the user's, as where the path of the trial's own would be too long
    temporary.note_imports(imported)
    assert not [*tmp_path.rglob(temporary.IMPORTS)]
    for name in ("of_the_user", "of_a_library"):
        del sys.modules[name]


def test_variables_are_set_ahead_as_the_target_will_set_them(monkeypatch):
    """A default of the target's does not take the place of what the user has set."""
    for name, value in (("HF_HOME", "/mine"), ("HF_ENDPOINT", "there"), ("HF_HUB_OFFLINE", "")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(temporary, "_READ_AT_FIRST", {})
    temporary.set_ahead(["HF_HOME?=/data", "HF_HUB_OFFLINE?=1", "HF_ENDPOINT=here=1"])
    assert [os.environ[name] for name in ("HF_HOME", "HF_HUB_OFFLINE", "HF_ENDPOINT")] == ["/mine", "1", "here=1"]
    assert temporary._read() == temporary._READ_AT_FIRST


def test_the_folder_is_named_for_its_server_so_that_a_driver_finds_that_of_a_killed_one(monkeypatch, tmp_path):
    monkeypatch.setattr(temporary, "MAX_PATH_BYTES", 1000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("AUTOTUNE_AGENT", mark := processes.new_mark())
    assert temporary.make_folder().name.startswith(names.prefix(mark))
