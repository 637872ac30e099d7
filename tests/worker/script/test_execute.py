"""How a script is run: its folder, arguments and constants."""

import os
import sys

import pytest

from autotune.trial.workload import Script
from autotune.worker.script import execute


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a file and returns its names."""
    monkeypatch.chdir(tmp_path)
    for name in ("path", "argv"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    folder = str(tmp_path)

    def run(path, **what):
        execute.execute(path, Script(working_dir=folder, **what))
        return vars(sys.modules["__main__"])

    return run


def test_a_script_finds_the_modules_beside_what_a_link_to_it_leads_to(tmp_path, run):
    for name in ("common", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "common" / "train.py").write_text("import sys\nfolder, own = sys.path[0], __file__\n")
    (link := tmp_path / "run" / "train.py").symlink_to("../common/train.py")
    found = run(link)
    assert found["folder"] == os.path.realpath(tmp_path / "common") and found["own"] == str(link)


def test_a_module_finds_what_lies_in_the_working_folder(tmp_path, run):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("import sys\nfolder = sys.path[0]\n")
    assert run(tmp_path / "package" / "train.py", module="package.train")["folder"] == str(tmp_path)


def test_a_script_is_among_what_was_imported_last(tmp_path, run):
    """The norm at which it clips by a function that it has imported itself, before it makes an Accelerator, was not seen."""
    (tmp_path / "train.py").write_text("from functools import reduce\n")
    run(tmp_path / "train.py")
    assert next(reversed(sys.modules)) == "__main__"


@pytest.mark.parametrize(
    ("text", "value"), [("16", 16), ("bf16", "bf16"), ("[16, 8]", [16, 8]), ("{'a': (1,)}", {"a": (1,)})]
)
def test_a_constant_gets_a_value_of_any_kind(tmp_path, run, text, value):
    (tmp_path / "train.py").write_text("CONSTANT = None\n")
    assert run(tmp_path / "train.py", assignments={"CONSTANT": text})["CONSTANT"] == value
