"""Which files are the user's code: by the project's folder, wherever libraries are installed."""

from pathlib import Path

import pytest

from autotune.worker import project

USERS = ["train.py", "src/mine/data.py", "mine/datasets/__init__.py", "scripts/train.py"]
LIBRARIES = [
    ".venv/lib/python3.11/site-packages/shelf/books.py",  # an environment within the project
    "env/shelf.py",  # an environment of another layout
    "libs/shelf/books.py",  # pip install --target
    "src/transformers/trainer.py",  # a checkout of a framework, in which one of its examples is run
    "../other/shelf/books.py",  # PYTHONPATH, --user, an editable install, a .pth file
]


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A project with libraries in all the places that pip and Python know."""
    monkeypatch.setattr(project, "_roots", [])
    monkeypatch.setattr(project, "_scripts", [])
    root = tmp_path / "project"
    for name in [*USERS, *LIBRARIES, "src/transformers/__init__.py", "pyproject.toml", "env/pyvenv.cfg"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    (root / "libs" / "shelf-1.0.dist-info").mkdir()
    return root


@pytest.mark.parametrize("script", ["train.py", "scripts/train.py"])
@pytest.mark.parametrize("around", ["", "pyvenv.cfg", "shelf-1.0.dist-info"])
def test_the_project_of_the_script_is_the_users_and_libraries_are_not(tree, monkeypatch, script, around):
    """In a project where `python -m venv .` was run no code was the user's, so that no batch size could be moved."""
    (tree / around).mkdir(exist_ok=True)
    assert not project.holds(str(tree / "train.py"))  # before a target is known
    project.settle(tree / script)
    assert [name for name in USERS if not project.holds(str(tree / name))] == []
    assert [name for name in LIBRARIES if project.holds(str(tree / name))] == []
    monkeypatch.chdir(tree)
    assert not project.holds("<frozen os>")


def test_the_working_folder_belongs_to_the_project_and_the_home_folder_is_none(tree, monkeypatch):
    monkeypatch.setenv("HOME", str(tree))  # with a pyproject.toml of its own
    project.settle(tree / "scripts" / "train.py", str(tree / "src"))
    assert project.holds(str(tree / "src" / "mine" / "data.py"))
    assert not project.holds(str(tree / "train.py"))


def test_a_user_without_a_home_folder_has_a_project(tree, monkeypatch):
    monkeypatch.setattr(project.os.path, "expanduser", lambda path: path)  # as it returns it where there is none
    project.settle(tree / "scripts" / "train.py")
    assert project.holds(str(tree / "train.py"))


def test_what_a_link_to_the_script_leads_to_belongs_to_the_project(tree, tmp_path):
    (tmp_path / "runs").mkdir()
    (link := tmp_path / "runs" / "train.py").symlink_to(tree / "scripts" / "train.py")
    project.settle(link)
    assert project.holds(str(tree / "scripts" / "train.py"))


def test_a_script_that_is_itself_in_a_library_folder_is_the_users(tree):
    project.settle(tree / "libs" / "shelf" / "books.py")
    assert not project.holds(project.__file__) and not project.holds(project.os.__file__) and not project.holds("")
    project.settle(Path(project.os.__file__))
    assert project.holds(project.os.__file__) and not project.holds(project.functools.__file__)
