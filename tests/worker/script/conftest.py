"""Fixtures for tests of training scripts: a warm server, and the folder in which scripts start."""

import pytest
from support.bench import Bench

from autotune.executors.local import LocalExecutor


@pytest.fixture(scope="module")
def bench(request, tmp_path_factory):
    """Runs scripts on a server that has imported the module's `IMPORTS`."""
    root = tmp_path_factory.mktemp("bench")
    executor = LocalExecutor(getattr(request.module, "IMPORTS", ["torch", "deepspeed"]), root / "server.log")
    executor.start()
    assert not executor.cold_reason
    yield Bench(executor, root)
    executor.close()


@pytest.fixture(scope="module")
def module_home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def home(module_home, monkeypatch):
    """The working folder of all scripts of a module; trials must leave it empty."""
    monkeypatch.chdir(module_home)
    yield module_home
    assert not list(module_home.iterdir())
