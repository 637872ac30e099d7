"""Locks of compilers that died, and what an op lacks."""

import deepspeed
import pytest
import torch

from autotune.errors import UserError
from autotune.worker.agent import ops


@pytest.fixture(autouse=True)
def built_here(monkeypatch, tmp_path):
    """Has ops be built in the test's folder."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))


def test_a_lock_that_nobody_holds_is_removed(tmp_path):
    lock = tmp_path / "py311_cpu" / "fused_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert ops.remove_stale_locks() == [str(lock)]
    assert not lock.exists()


def test_a_lock_whose_builder_lives_is_kept(tmp_path):
    lock = tmp_path / "fused_adam" / "lock"
    lock.parent.mkdir()
    with open(lock, "x"):  # as torch's FileBaton holds it
        assert ops.remove_stale_locks() == []
        assert lock.exists()
    assert ops.remove_stale_locks() == [str(lock)]


def test_what_is_no_lock_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "lock").mkdir()
    (tmp_path / "lock.py").touch()
    assert ops.remove_stale_locks() == []
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "missing"))
    assert ops.remove_stale_locks() == []


def test_an_op_is_built_by_its_name(tmp_path, monkeypatch):
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    loaded = []
    for name in ("fused_adam", "cpu_adam"):
        monkeypatch.setattr(ALL_OPS[name], "load", lambda verbose, name=name: loaded.append(name))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    ops.build("fused_adam")
    ops.build("cpu_adam")
    assert loaded == ["fused_adam", "cpu_adam"]
    with pytest.raises(UserError, match="no op no_such_op"):
        ops.build("no_such_op")


# As torch words it, shortened.
NO_HEADER = """Error building extension 'cpu_adam': [1/2] c++ -MMD -MF main.o.d -fPIC -std=c++20 -c main.cpp -o main.o
FAILED: [code=1] main.o
c++ -MMD -MF main.o.d -fPIC -std=c++20 -c main.cpp -o main.o
main.cpp:2:10: fatal error: nope.h: No such file or directory
    2 | #include <nope.h>
      |          ^~~~~~~~
compilation terminated.
ninja: build stopped: subcommand failed.
"""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (NO_HEADER, "main.cpp:2:10: fatal error: nope.h: No such file or directory"),
        ("Unable to JIT load the cpu_adam op", "Unable to JIT load the cpu_adam op"), ("", "RuntimeError"),
    ],
)  # fmt: skip
def test_an_op_that_cannot_be_built_is_told_with_what_the_compiler_said(said, told, tmp_path, monkeypatch):
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    def load(verbose):
        raise RuntimeError(said)

    monkeypatch.setattr(ALL_OPS["cpu_adam"], "load", load)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(UserError) as refused:
        ops.build("cpu_adam")
    assert str(refused.value) == f"cannot build cpu_adam: {told}"


@pytest.mark.parametrize(("has_libaio", "why"), [(True, ""), (False, "no libaio: install libaio-dev")])
def test_on_cuda_too_async_io_is_asked_for_libaio(monkeypatch, has_libaio, why):
    from deepspeed.ops.op_builder.all_ops import ALL_OPS
    from deepspeed.ops.op_builder.async_io import AsyncIOBuilder  # CUDA's

    monkeypatch.setitem(ALL_OPS, "async_io", AsyncIOBuilder())
    monkeypatch.setitem(vars(deepspeed.ops), "__compatible_ops__", {"async_io": has_libaio})
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(ops, "_why_no_cuda", lambda: "")
    monkeypatch.setattr(ops.shutil, "which", lambda program: program)
    assert ops.why_missing("async_io") == why
