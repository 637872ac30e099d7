"""`environment.json` says with what, on what, when and from which commit figures come."""

from datetime import datetime

import pytest
import torch
from support.paths import ROOT

from autotune import __version__
from autotune.system.provenance import commit, provenance


def test_it_names_libraries_processor_and_date(tmp_path):
    found = provenance(tmp_path)
    assert found["libraries"]["autotune"] == __version__ and found["libraries"]["torch"] == torch.__version__
    assert {"optuna", "deepspeed"} <= set(found["libraries"])
    assert datetime.fromisoformat(found["date"]).tzinfo is not None and found["processor"]["name"]
    assert found["commit"] is None


HEAD = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    "files",
    [
        {".git/HEAD": "ref: refs/heads/main\n", ".git/refs/heads/main": f"{HEAD}\n"},
        {".git/HEAD": "ref: refs/heads/main\n", ".git/packed-refs": f"# pack-refs\n{HEAD} refs/heads/main\n"},
        {".git/HEAD": f"{HEAD}\n"},
        {
            ".git": "gitdir: whole/worktrees/w\n", "whole/worktrees/w/HEAD": "ref: refs/heads/w\n",
            "whole/worktrees/w/commondir": "../..\n", "whole/refs/heads/w": f"{HEAD}\n",
        },
    ],
    ids=["branch", "packed", "detached", "worktree"],
)  # fmt: skip
def test_the_commit_is_that_of_the_project(tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert commit(tmp_path / "studies") == HEAD


def test_a_broken_repository_has_no_commit(tmp_path):
    (tmp_path / ".git").mkdir()
    assert commit(tmp_path) is None


def test_this_repositorys_commit_is_found():
    found = commit(ROOT)
    assert found is None or (len(found) == 40 and int(found, 16))
