"""Recomputation that a candidate turns off, and code that may make its model in shards."""

import dataclasses
import functools
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from autotune.space.candidate import Candidate, from_deepspeed
from autotune.trial.workload import Probed, Script
from autotune.worker import project
from autotune.worker.measure import gradient_check
from autotune.worker.script import context, engine, patching, run

CALLER = "def run(checkpoint):\n    return checkpoint(lambda x: x + 1, 2, use_reentrant=False)\n"


def _untouched(micro, steps, **what):
    return Script(probed=Probed(ds_config={}, micro_batch_size=micro, gradient_accumulation_steps=steps, **what))


@pytest.fixture
def skipping():
    """Hooks that skip what a script recomputes, and the function that it calls for that."""
    report = SimpleNamespace(side_changes=[], unreproducible=[])
    script = context.ScriptContext.__new__(context.ScriptContext)
    script.report = report
    hooks = engine.EngineHooks(script, attach=lambda *_: None, beside=lambda _: None)
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


def test_recomputation_by_torchs_wrapper_is_the_users_to_take_out(skipping):
    checkpoint, report = skipping
    wrapped = checkpoint_wrapper(torch.nn.Identity())
    wrapped.checkpoint_fn = functools.partial(checkpoint, use_reentrant=False)
    assert wrapped(3) == 3
    assert report.side_changes == [engine.UNWRAPPED] and report.unreproducible == []


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_that_is_there_is_shared_out_at_stage_3_alone(stage):
    """DeepSpeed does so also where `zero.Init` is off, and below stage 3 each trial crashed."""
    script = context.ScriptContext.__new__(context.ScriptContext)
    script.candidate = Candidate.of({"micro_batch_size": 1, "zero_stage": stage})
    script.request = SimpleNamespace(ds_config={"zero_optimization": {"stage": stage}})
    hooks = engine.EngineHooks(script, attach=lambda *_: None, beside=lambda _: None)
    given, model = [], nn.Linear(1, 1)

    def init(self, module=None, config_dict_or_path=None, config=None, enabled=True, dtype=None):
        given.append((module, enabled))

    hooks._zero_init(init, object(), model, config_dict_or_path={}, dtype=torch.bfloat16)
    assert given == [(model, True) if stage == 3 else (None, False)]


@pytest.mark.parametrize("given", [{"train_batch_size": 4}, "ds_config.json", "out/ds_config.json"])
def test_what_a_script_sets_deepspeeds_flag_to_is_a_file_that_it_writes_or_a_dict(tmp_path, monkeypatch, given):
    """A dict, which DeepSpeed takes there, ended each trial in a TypeError."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("args.deepspeed_config = made(args)\n")
    (tmp_path / "out").mkdir()
    for place, at in (("ds_config.json", 1.0), ("out/ds_config.json", 9.0)):
        (tmp_path / place).touch()
        os.utime(place, (at, at))
    script = context.ScriptContext.__new__(context.ScriptContext)
    script.left_out, script.began = ["--deepspeed_config"], 5.0
    script.request, script.report = SimpleNamespace(target=str(tmp_path / "train.py")), SimpleNamespace(flags={})
    hooks = engine.EngineHooks(script, attach=lambda *_: None, beside=lambda _: None)
    written = "out/ds_config.json" if given == "out/ds_config.json" else ""
    assert hooks._by_flag(SimpleNamespace(deepspeed_config=given)) == (given, written) and not script.report.flags


def test_a_replicate_differs_also_where_weights_are_shared_out_and_where_the_engine_is_not_called():
    """It was the original run itself, without a difference by chance, where ZeRO 3 makes the model in shards."""
    model, steps = torch.nn.Linear(4, 4), SimpleNamespace(global_steps=0)
    model.weight.ds_tensor, own = model.weight.detach().clone(), model.weight.detach().clone()
    model.weight.data = torch.empty(0)
    gradient_check.perturb(model, 1)
    assert not model.weight.ds_tensor.equal(own) and model.weight.ds_tensor.allclose(own, rtol=1e-2)
    model.weight.data, steps.module = own, model
    gradient_check.draw_otherwise(steps, 1)
    drawn = []
    for steps.global_steps in (0, 1):
        torch.manual_seed(0)
        model(torch.ones(4))
        drawn.append(torch.rand(1))
    assert drawn[0] != drawn[1]


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
    hooks = engine.EngineHooks(found, attach=lambda *_: None, beside=lambda _: None)
    hooks._pid = -1  # this is a child
    assert hooks._initialize(lambda model: model, model="untouched") == "untouched"


@pytest.mark.parametrize(
    ("own", "values", "expected", "said"),
    [
        ({"zero_optimization": {"stage": 1}}, {"zero_stage": 0}, (8, 2, 0), ["ZeRO 0 instead of 1"]),
        ({"zero_optimization": {"stage": 3}}, {"zero_stage": 0}, (8, 2, 3), []),
        ({"train_micro_batch_size_per_gpu": 4}, {"micro_batch_size": 16, "gradient_accumulation_steps": 1}, (4, 1, 0),
         ["micro-batch 4 x 1 instead of 4 x 2"]),
        ({"gradient_accumulation_steps": 5}, {}, (8, 5, 0), []),
        ({"train_micro_batch_size_per_gpu": 3}, {"micro_batch_size": 3}, (3, 2, 0), []),
        ({"gradient_clipping": 0.5}, {"gradient_clipping": 2}, (8, 2, 0), []),
        ({}, {"gradient_clipping": 3}, (8, 2, 0), ["gradient_clipping 3 instead of 2"]),
    ],
    ids=["as the first", "another stage", "another batch", "in the baseline", "moved by a flag", "its own clipping", "clipping"],
)  # fmt: skip
def test_a_model_beside_the_first_follows_a_trial_in_what_the_two_have_alike(own, values, expected, said):
    """It was given the first one's settings in the baseline, too, which so trained otherwise than the script."""
    alike = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2, "optimizer": {"type": "Adam"}}
    alike["gradient_clipping"] = 2
    first = {**alike, "zero_optimization": {"stage": own.get("zero_optimization", {"stage": 0})["stage"] % 3}}
    script = context.ScriptContext.__new__(context.ScriptContext)
    script.script = _untouched(8, 2)
    script.request = SimpleNamespace(world_size=2)
    script.candidate = Candidate.of({**from_deepspeed(first, 2).values(), **values})
    found, changes = script.config_beside({**alike, **own}, first)
    seen = from_deepspeed(found, 2)
    assert (seen.micro_batch_size, seen.gradient_accumulation_steps, seen.zero_stage) == expected
    assert changes == said and found["optimizer"] == {"type": "Adam"}


def test_what_changes_in_the_configuration_of_another_model_is_told(monkeypatch):
    """The answer named the first model's call alone; one dict for both had been changed for the first one by then."""
    report = SimpleNamespace(side_changes=[], caveats=[], unreproducible=[])
    script = context.ScriptContext.__new__(context.ScriptContext)
    script.report, script.request = report, SimpleNamespace(world_size=2)
    script.script = _untouched(8, 1)
    script.candidate = Candidate.of({"micro_batch_size": 4, "gradient_accumulation_steps": 2})
    monkeypatch.setattr(engine, "users_caller", lambda: "gan.py:22")
    hooks = engine.EngineHooks(script, attach=lambda *_: None, beside=lambda _: None)
    first, given = {"train_micro_batch_size_per_gpu": 8}, {"train_micro_batch_size_per_gpu": 4}
    hooks._first = (given, first)
    hooks._beside(given, given)
    hooks._first = ("ds.json", first)
    hooks._beside("ds.json", first)  # which the exported file takes the place of
    (text,) = report.side_changes
    assert "gan.py:22" in text and "micro-batch 4 x 2 instead of 8 x 1" in text and report.caveats == [engine.FURTHER]
    assert "the exported file" not in text
    hooks._first, hooks._first_at = (given, first), "gan.py:22"
    hooks._beside({**first}, {**first, "optimizer": {"type": "SGD"}})  # whose optimizer the exported file does not have
    assert "the exported file for the first alone" in report.side_changes[-1]


@pytest.mark.parametrize(
    ("code", "configured", "named"),
    [
        ('settings = {"gradient_accumulation_steps": cfg["optim"]["accum"]}', 2, "cfg['optim']['accum']"),
        ("settings = dict(gradient_accumulation_steps=ACCUM)", 2, "ACCUM"),
        ('settings["gradient_accumulation_steps"] = args.accum', 2, "args.accum"),
        ('settings["gradient_accumulation_steps"] = args.accum', 1, ""),
        ('settings = {"gradient_accumulation_steps": 2}', 2, ""),
    ],
    ids=["dict", "call", "item", "moved by a flag", "number"],
)
def test_what_a_loop_may_count_its_micro_batches_by_is_told(code, configured, named, tmp_path, monkeypatch):
    """A loop over `range(ACCUM)` trained twice as many samples in each turn by an answer that halved the accumulation."""
    (tmp_path / "train.py").write_text(code)
    report = SimpleNamespace(side_changes=[])
    script = context.ScriptContext.__new__(context.ScriptContext)
    script.report, script.script = report, _untouched(8, 2)
    script.request = SimpleNamespace(world_size=2)
    script.candidate = Candidate.of({"micro_batch_size": 16, "gradient_accumulation_steps": 1})
    frame = SimpleNamespace(f_code=SimpleNamespace(co_filename=str(tmp_path / "train.py")))
    monkeypatch.setattr(engine, "users_frame", lambda: frame)
    hooks = engine.EngineHooks(script, attach=lambda *_: None, beside=lambda _: None)
    hooks._tell_count({"gradient_accumulation_steps": configured})
    assert len(report.side_changes) == bool(named)
    assert all(f"`{named}`: set that to 1 instead of 2" in text for text in report.side_changes)


def test_a_batch_in_a_class_is_cast_and_a_cache_is_left_alone():
    """Each bf16 trial of a script with batches in a dataclass crashed for want of a cast."""
    script = context.ScriptContext.__new__(context.ScriptContext)
    script.candidate, script.script = Candidate(micro_batch_size=2, precision="bf16"), _untouched(2, 1)
    script.casts_inputs, script.batch_classes = True, {SimpleNamespace}
    script.report = SimpleNamespace(side_changes=[], unreproducible=[])
    fields, cache = dataclasses.make_dataclass("Batch", ["x"])(torch.zeros(2)), nn.Module()
    cache.kept = torch.zeros(2)
    graph, device = SimpleNamespace(x=torch.zeros(2)), SimpleNamespace(device="cpu")
    args, kwargs = script.cast(device, (fields, cache), {"graph": graph})
    assert args[0].x.dtype == kwargs["graph"].x.dtype == torch.bfloat16
    assert fields.x.dtype == graph.x.dtype == torch.float32 and args[1] is cache
    assert script.report.side_changes
    cache, script.report.side_changes = SimpleNamespace(kept=torch.zeros(2)), []
    script.batch_classes = set()
    assert script.cast(device, (cache,), {}) is None and not script.report.side_changes


@pytest.mark.parametrize(("stage", "n_said"), [(1, 0), (0, 1)])
def test_a_script_that_fills_its_dict_from_a_file_keeps_to_the_file(tmp_path, monkeypatch, stage, n_said):
    """It was told to pass another file in place of the dict, though the file's flag carries what it does not set itself."""
    monkeypatch.chdir(tmp_path)
    batch, off = (
        {"train_micro_batch_size_per_gpu": 4},
        {"offload_optimizer": {"device": "none"}},
    )  # which a trial leaves out
    read_in = {"zero_optimization": {"stage": 2, "overlap_comm": False}, "gradient_clipping": 1.0} | batch
    Path("ds.json").write_text(json.dumps(read_in))
    script = context.ScriptContext.__new__(context.ScriptContext)
    script.report = report = SimpleNamespace(side_changes=[], unreproducible=[], flags={})
    script.family, script.json_flags = "", {str(tmp_path / "ds.json"): ["--ds"]}
    zero = {"zero_optimization": {"stage": stage, "overlap_comm": True}}
    script.config, script.request = lambda _: zero | {"gradient_clipping": 0.5} | batch, SimpleNamespace(world_size=1)
    prepared = SimpleNamespace(config_source="")
    hooks = engine.EngineHooks(script, attach=lambda *_: None, beside=lambda _: None)
    hooks._tell_file(read_in | {"zero_optimization": {"stage": 1, "overlap_comm": False, **off}}, prepared)
    assert (prepared.config_source, report.flags) == ("ds.json", {"ds_config": ["--ds"]})
    said = "the script sets `zero_optimization.stage` itself once it has read the file of `--ds`: set it to 0 there, in place of 1"
    assert len(report.side_changes) == n_said and all(said in text for text in report.side_changes)


@pytest.mark.parametrize(
    ("micro", "steps", "set_rate", "factor", "config"),
    [
        (8, 2, 0.05, 2.0, ()),
        (8, 2, 0.1, 1.0, ()),
        (16, 1, 0.05, 1.0, ()),
        (8, 1, 0.05, 1.0, ()),
        (8, 2, 0.05, 1.0, (("optimizer.params.lr", 0.05),)),
    ],
    ids=[
        "by the micro-batch",
        "of the global batch",
        "the script's own",
        "another global batch, which the rule leaves",
        "that the trial asks for",
    ],
)
def test_a_rate_that_follows_the_micro_batch_is_the_scripts_own_where_the_global_batch_stays(
    micro, steps, set_rate, factor, config
):
    """Half the micro-batch of `lr * batch_size / 256` was called drop-in at half the rate."""
    said, weight = [], torch.nn.Parameter(torch.ones(1))
    trial = SimpleNamespace(
        candidate=Candidate(micro_batch_size=micro, gradient_accumulation_steps=steps, config=config),
        script=_untouched(16, 1, learning_rates=(0.1,)),
        request=SimpleNamespace(learning_rate_factor=1.0), changed=said.append,
    )  # fmt: skip
    optimizer = torch.optim.SGD([weight], lr=set_rate)
    rates = engine.learning_rates(optimizer)
    assert engine.follow_rate(trial, SimpleNamespace(basic_optimizer=optimizer), rates) == factor
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.item() == pytest.approx(1 - factor * set_rate)
    assert ["multiply what it sets by 2" in text for text in said] == [True] * (factor == 2)
