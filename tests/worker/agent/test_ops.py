"""Locks of compilers that died, and what an op lacks."""

import pytest
import torch

from autotune.errors import UserError
from autotune.worker.agent import ops


def test_a_lock_that_nobody_holds_is_removed(tmp_path):
    lock = tmp_path / "py311_cpu" / "fused_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert ops.remove_stale_locks(tmp_path) == [str(lock)]
    assert not lock.exists()


def test_a_lock_whose_builder_lives_is_kept(tmp_path):
    lock = tmp_path / "fused_adam" / "lock"
    lock.parent.mkdir()
    with open(lock, "x"):  # as torch's FileBaton holds it
        assert ops.remove_stale_locks(tmp_path) == []
        assert lock.exists()
    assert ops.remove_stale_locks(tmp_path) == [str(lock)]


def test_what_is_no_lock_is_left_alone(tmp_path):
    (tmp_path / "lock").mkdir()
    (tmp_path / "lock.py").touch()
    assert ops.remove_stale_locks(tmp_path) == []
    assert ops.remove_stale_locks(tmp_path / "missing") == []


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


@pytest.mark.parametrize(("has_libaio", "why"), [(True, ""), (False, "no libaio: install libaio-dev")])
def test_on_cuda_too_async_io_is_asked_for_libaio(monkeypatch, has_libaio, why):
    from deepspeed.ops.op_builder.all_ops import ALL_OPS
    from deepspeed.ops.op_builder.async_io import AsyncIOBuilder  # CUDA's

    builder = AsyncIOBuilder()
    monkeypatch.setattr(builder, "has_function", lambda name, libraries: has_libaio)
    monkeypatch.setitem(ALL_OPS, "async_io", builder)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(ops, "_why_no_cuda", lambda: "")
    monkeypatch.setattr(ops.shutil, "which", lambda program: program)
    assert ops.why_missing("async_io") == why
