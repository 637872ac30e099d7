"""Modules that the server imports for its ranks."""

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autotune.worker import run
from autotune.worker.agent import preload


@pytest.mark.parametrize("name", [*preload.LAZY_MODULES, *preload.RANK_MODULES])
def test_each_module_can_be_imported(name):
    with preload.compiled_when_called():
        assert importlib.import_module(name)


DECORATED = """
import torch
@torch.compile
def outer(x):
    return 2 * inner(x)
@torch.compile
def inner(x):
    return x + 1
class Net:
    @torch.compile
    def free(self, x):
        return x
def free():
    return "a function with a method's name"
@torch.compile(dynamic=True)
def at_once(x):
    return x
"""


def test_functions_that_an_import_decorates_are_compiled_when_one_is_called(shelf, monkeypatch):
    compiled = []

    def compile(function=None, **options):
        if function is None:
            return lambda function: compile(function, **options)
        compiled.append((function.__name__, options))
        return function

    monkeypatch.setattr(torch, "compile", compile)
    (shelf / "decorated.py").write_text(DECORATED)
    with preload.compiled_when_called():
        import decorated
    assert compiled == [("at_once", {"dynamic": True})] and torch.compile is compile
    kept = decorated.outer  # as another module has imported it
    assert decorated.outer(3) == kept(3) == 8
    assert sorted(name for name, _ in compiled) == ["at_once", "free", "inner", "outer"]
    assert decorated.outer is not kept and decorated.inner.__closure__ is None  # compiled, each under its name
    assert decorated.Net().free(3) == 3 and decorated.free().startswith("a function")


@pytest.mark.system
def test_importing_for_ranks_leaves_the_compiler_alone():
    code = """
import sys
from autotune.worker.agent import preload
preload.import_rank_modules()
assert "deepspeed.runtime.zero.muon.original_muon" in sys.modules and "torch._inductor.compile_fx" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_mode_of_a_rank_is_imported():
    """A module that the entry point imports only for a mode would be imported in every rank that runs it."""
    imported = {
        node.module
        for node in ast.walk(ast.parse(Path(run.__file__).read_text()))
        if isinstance(node, ast.ImportFrom) and node.col_offset and str(node.module).startswith("autotune.worker.")
    }
    # The builder of ops comes with the server itself.
    assert imported - {"autotune.worker.agent"} == set(preload.RANK_MODULES) - {"autotune.worker.run"}


def test_a_module_of_ours_that_cannot_be_imported_is_an_error(monkeypatch):
    monkeypatch.setattr(preload, "RANK_MODULES", ("autotune.worker.no_such_module",))
    monkeypatch.setattr(preload, "LAZY_MODULES", ("deepspeed.no_such_module",))
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        preload.import_rank_modules()


# pyarrow's allocator, OpenBLAS and others start threads of which Python knows nothing.
NATIVE = """
import ctypes
libc = ctypes.CDLL(None)
start = ctypes.cast(libc.sleep, ctypes.c_void_p)
libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, start, ctypes.c_void_p(600))
"""


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """Modules of which some start a thread, one by way of another."""
    (tmp_path / "native.py").write_text(NATIVE)
    (tmp_path / "outer.py").write_text("import json\nimport native\n")
    (tmp_path / "quiet.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.system
def test_a_module_that_starts_a_thread_is_named_and_left_out_and_ranks_are_forked_all_the_same(shelf):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(shelf), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "autotune.worker", "serve", "outer", "quiet"]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    answer = json.loads(done.stdout)
    assert answer["warm"], done.stderr
    assert answer["reason"].count("importing `outer` started the native thread") == 1


@pytest.mark.process
def test_what_a_trial_imported_is_preloaded_except_what_starts_a_thread(shelf):
    code = """
import sys
from autotune.worker.agent import preload
assert preload.preload_more(["quiet", "outer", "json"])
assert "quiet" in sys.modules and "native" not in sys.modules
assert [*preload._import_all(["outer"])] == ["outer"] and not preload.preload_more([])
"""
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": f"{shelf}:{os.getcwd()}"}, check=True)


@pytest.mark.process
def test_the_users_own_package_is_not_preloaded_wherever_it_is_installed(shelf, monkeypatch):
    """It may read LOCAL_RANK as it is imported, which only ranks have."""
    monkeypatch.setattr(preload.project, "_roots", [])
    (shelf / "mine").mkdir()
    for name in ("mine/__init__.py", "mine/devices.py", "spaces/parts.py"):
        (shelf / name).parent.mkdir(exist_ok=True)
        (shelf / name).write_text("")
    preload.project.settle(shelf / "scripts" / "train.py", str(shelf))
    assert not preload._import_all(["mine.devices:rank", "spaces.parts", "quiet", "no_such_module"])
    assert not {"mine", "mine.devices", "spaces", "quiet"} & sys.modules.keys()
    preload.project.settle(shelf / "scripts" / "train.py")
    preload._import_all(["mine.devices:rank", "spaces.parts", "quiet"])
    assert {"mine", "mine.devices", "spaces", "spaces.parts", "quiet"} <= sys.modules.keys()
    for name in ("mine", "mine.devices", "spaces", "spaces.parts", "quiet"):
        del sys.modules[name]


@pytest.mark.process
def test_a_library_that_forks_a_process_as_it_is_imported_is_not_waited_for(shelf):
    (shelf / "forks.py").write_text("import os, signal\nif os.fork() == 0:\n    signal.pause()\n")
    code = """
import os, signal
from autotune.system import processes
from autotune.worker.agent import preload, rank_start
rank_start.prctl(rank_start.PR_SET_CHILD_SUBREAPER, 1)
assert preload.preload_more(["forks"])
left = processes.descendants(os.getpid())
assert len(left) == 2
for pid in left:
    os.kill(pid, signal.SIGKILL)
"""
    environment = os.environ | {"PYTHONPATH": f"{shelf}:{os.getcwd()}"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=300)


# What NVIDIA's management library does where devices are counted, and what a library does that starts CUDA past torch.
DRIVER = """
import _thread, ctypes, os, sys, time
def driver():
    ctypes.CDLL(None).prctl(15, b"cuda00001800007", 0, 0, 0)
    time.sleep(600)
_thread.start_new_thread(driver, ())
while b"cuda00001800007" not in b"".join(open(f"/proc/self/task/{task}/comm", "rb").read() for task in os.listdir("/proc/self/task")):
    time.sleep(0.01)
"""
STARTED = """
import ctypes
class Library:
    def cuDeviceGetCount(self, n):
        return 0
open_library = ctypes.CDLL
ctypes.CDLL = lambda name, *more: Library() if name == "libcuda.so.1" else open_library(name, *more)
"""


@pytest.mark.process
def test_the_thread_of_nvidias_driver_is_no_reason_against_forking_but_cuda_past_torch_is(shelf):
    (shelf / "counts.py").write_text(DRIVER)
    (shelf / "starts.py").write_text(STARTED)
    code = """
from autotune.worker.agent import preload
assert preload.preload_more(["counts"]) and not preload._traces()
assert preload._import_all(["starts"]) == {"starts": "importing `starts` initialised CUDA"}
assert not preload.preload_more([])
"""
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": f"{shelf}:{os.getcwd()}"}, check=True)
