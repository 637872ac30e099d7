"""What all tests share: the zoo of models, and one warm server that runs trials of them for the whole session."""

import contextlib
import logging
import os
import shutil
import signal
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy
from hypothesis import HealthCheck, settings
from support.paths import MODELS, ROOT
from support.zoo import Zoo, assert_nothing_left, shared_memory

from autotune.executors.local import LocalExecutor
from autotune.study.storage import database

pytest_plugins = ["support.lanes"]

# As `Runner.run` does for a study: set before numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# A rank with several threads waits for the trials of other workers at every operation: 3 s instead of 0.6 for six steps.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# DeepSpeed's compiled ops and the like; git-ignored.
os.environ.setdefault("AUTOTUNE_CACHE", str(ROOT / ".cache" / "autotune"))

# A shell's background job ignores Ctrl-C, one of nohup a lost terminal, and so would all that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Nobody sets logging up, and Python would print what libraries warn of.
logging.getLogger().addHandler(logging.NullHandler())

# How long examples take is up to the machine.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(scope="session")
def models() -> Path:
    """The zoo: one small model a file, named for what it does to a trial."""
    return MODELS


@pytest.fixture(scope="session")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalExecutor]:
    """One warm server for all tests that do not kill it; torch is imported there and nowhere else."""
    modules = ["torch", "transformers:Trainer", "transformers.models.llama.modeling_llama", "lightning"]
    few = {"AUTOTUNE_MOST_PROCESSES": "24"}  # so that a fork bomb need not grow large to be seen
    executor = LocalExecutor(modules, tmp_path_factory.mktemp("server") / "server.log", few)
    yield executor
    executor.close()


@pytest.fixture(scope="session", autouse=True)
def _copied_databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Has new SQLite databases copied from an empty one: Optuna takes 0.25 s to create its tables, a copy 0.01 s.

    Commands in processes of their own create theirs.
    """
    empty, made = tmp_path_factory.mktemp("database") / "empty.db", database._made
    database.open_storage(f"sqlite:///{empty}").engine.dispose()

    def copied(url: str, connect: dict[str, object]) -> database.Storage:
        if database.urls.is_sqlite(url):
            name = sqlalchemy.make_url(url).database or ""
            with contextlib.suppress(OSError):  # creating it then gives the error that users see
                if not os.path.exists(name) and not os.path.exists(f"{name}-wal"):  # which belongs to another one
                    draft = shutil.copyfile(empty, f"{name}.{os.getpid()}-{threading.get_ident()}")
                    os.rename(draft, name)
        return made(url, connect)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "_made", copied)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_disks() -> Iterator[None]:
    """Has no file of this process wait for its disk: no power fails in a test, and a study waits fifty times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture
def zoo(executor: LocalExecutor, tmp_path: Path) -> Iterator[Zoo]:
    """Runs trials on the session's server; afterwards nothing of them may be left."""
    before = shared_memory()
    zoo = Zoo(executor, tmp_path / "trials")
    yield zoo
    assert_nothing_left(zoo, before)


@pytest.fixture
def write_model(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a target that only one test needs."""

    def write(text: str) -> Path:
        path = tmp_path / "own_model.py"
        path.write_text(textwrap.dedent(text))
        return path

    return write
