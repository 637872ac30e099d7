"""Fixtures for tests of training scripts: a warm server, and the folder in which scripts start."""

import contextlib

import pytest
from support.bench import Bench

from autotune.executors.local import LocalExecutor


@pytest.fixture(scope="module")
def bench(request, executor, tmp_path_factory):
    """Runs scripts on a server that has imported the module's `IMPORTS`, or else on that of the session."""
    root = tmp_path_factory.mktemp("bench")
    imports = getattr(request.module, "IMPORTS", None)
    with (
        contextlib.closing(LocalExecutor(imports, root / "server.log"))
        if imports
        else contextlib.nullcontext(executor) as own
    ):
        own.start()
        assert not own.cold_reason
        yield Bench(own, root)


@pytest.fixture(scope="module")
def module_home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def home(module_home, monkeypatch):
    """The working folder of all scripts of a module; trials must leave it empty."""
    monkeypatch.chdir(module_home)
    yield module_home
    assert not list(module_home.iterdir())
