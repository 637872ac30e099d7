"""Recomputation that a candidate turns off, and code that may make its model in shards."""

import importlib.util
import os
import sys
from types import SimpleNamespace

import pytest

from autotune.worker import project
from autotune.worker.script import context, engine, patching, run

CALLER = "def run(checkpoint):\n    return checkpoint(lambda x: x + 1, 2, use_reentrant=False)\n"


@pytest.fixture
def skipping():
    """Hooks that skip what a script recomputes, and the function that it calls for that."""
    report = SimpleNamespace(side_changes=[], unreproducible=[])
    script = context.ScriptContext.__new__(context.ScriptContext)
    script.report = report
    hooks = engine.EngineHooks(script, attach=lambda *_: None)
    hooks._script_recomputes = False
    module = SimpleNamespace(checkpoint=lambda function, *args, **kwargs: "recomputed")
    patching.patch(module, "checkpoint", hooks._checkpoint)
    return module.checkpoint, report


def caller_in(folder):
    (folder / "caller.py").write_text(CALLER)
    spec = importlib.util.spec_from_file_location("caller", folder / "caller.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.run


def test_recomputation_that_a_library_asks_for_cannot_be_taken_out_by_the_user(skipping, tmp_path):
    checkpoint, report = skipping
    run = caller_in(tmp_path)
    assert run(checkpoint) == run(checkpoint) == 3
    assert report.unreproducible == report.side_changes and len(report.side_changes) == 1
    assert "inside a library" in report.side_changes[0]


def test_recomputation_that_the_script_asks_for_is_the_users_to_take_out(skipping, tmp_path, monkeypatch):
    checkpoint, report = skipping
    monkeypatch.setattr(project, "_roots", [])
    project.settle(tmp_path / "train.py")
    assert caller_in(tmp_path)(checkpoint) == 3 and report.unreproducible == []


@pytest.mark.parametrize(
    ("line", "names_it"),
    [
        ("with deepspeed.zero.Init(enabled=args.stage == 3):", True),
        ("from deepspeed.zero import GatheredParameters, Init", True),
        ("keep = HfDeepSpeedConfig(ds_config)", True),
        ("from deepspeed.ops.adam import FusedAdam", False),
        ("zero_point = Initial(3)", False),
    ],
)
def test_code_that_may_make_its_model_in_shards_is_known(line, names_it, tmp_path, monkeypatch):
    monkeypatch.setattr(project, "_roots", [])
    project.settle(tmp_path / "train.py")
    (tmp_path / "sharded.py").write_text(line)
    monkeypatch.setitem(sys.modules, "sharded", SimpleNamespace(__file__=str(tmp_path / "sharded.py")))
    assert engine._names_sharding() == names_it


def test_a_script_that_sets_what_cuda_reads_once_is_told_that_it_may_come_too_late(monkeypatch):
    """The allocator's settings had no effect in trials, without a word."""
    report = SimpleNamespace(caveats=[])
    script = context.ScriptContext.__new__(context.ScriptContext)
    script.report, script.memory = report, SimpleNamespace(cuda=True)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.delenv(context.VISIBLE, raising=False)
    script._environment = dict(os.environ)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # by Lightning's trainer
    script.check_devices()
    assert not report.caveats
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    script.check_devices()
    assert "set it for all: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True autotune" in report.caveats[0]


def test_a_process_of_the_scripts_own_is_noted_before_it_trains_and_left_as_it_is(monkeypatch):
    """What its ranks wrote passed for that of the trial, which read "it had loaded and begun to train"."""
    noted, found = [], SimpleNamespace(candidate=None, meter=None)
    found.recorder = SimpleNamespace(event=lambda **what: noted.append(what))
    for frame, meter in ((None, None), (object(), None), (object(), object())):
        monkeypatch.setattr(run, "users_frame", lambda frame=frame, **_: frame)
        found.meter = meter
        assert run._start_process(found, lambda *args: args, "process") == ("process",)
    assert noted == [{"phase": "other_process"}]
    hooks = engine.EngineHooks(found, attach=lambda *_: None)
    hooks._pid = -1  # this is a child
    assert hooks._initialize(lambda model: model, model="untouched") == "untouched"
