"""Where a device is not used, one sentence says why; what ranks do only on a CPU is left out on any accelerator."""

import json
import os
import types

import deepspeed
import pytest
import torch
from support.instant import ENVIRONMENT
from support.paths import MODELS

from autotune.errors import UserError
from autotune.system.machine import processor_name
from autotune.trial.request import TrialRequest
from autotune.trial.result import RankReport
from autotune.worker import device, rank
from autotune.worker.agent import preload
from autotune.worker.measure import gradient_check, trace, witnesses
from autotune.worker.model import inspect
from autotune.worker.script.frameworks import accelerate, huggingface, lightning


def raises(*_):
    raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update it")


@pytest.mark.parametrize(
    ("cuda", "init", "said"),
    [
        (None, raises, "is not built for it: install a build that is; or set DS_ACCELERATOR=cpu"),
        ("13.0", raises, "cannot use it: The NVIDIA driver on your system is too old (found version 11040).; or set"),
        ("13.0", lambda: None, "DeepSpeed does not take it: set DS_ACCELERATOR=cuda; or set DS_ACCELERATOR=cpu"),
    ],
)
def test_a_device_that_is_not_used_is_told_with_the_reason(monkeypatch, cuda, init, said):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device, "unused_device", lambda: "an NVIDIA GPU")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert "this machine has an NVIDIA GPU, but " in device._why_cpu() and said in device._why_cpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "CUDA_VISIBLE_DEVICES='7' leaves none visible" in device._why_cpu()
    for hides_all in ("", " -1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hides_all)
        assert device._why_cpu() == ""


@pytest.mark.parametrize(("tf32", "said"), [("tf32", True), ("ieee", False)])
def test_tensorfloat_is_read_where_a_script_uses_either_setting_of_torch(tf32, said, monkeypatch):
    """To ask by the older one raises where the newer one was used."""
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has the older setting alone")
    before = torch.get_float32_matmul_precision()
    try:
        torch.backends.cuda.matmul.fp32_precision = tf32
        assert device.multiplies_in_tf32() is said
        torch.set_float32_matmul_precision("high")
        assert device.multiplies_in_tf32()
    finally:
        torch.set_float32_matmul_precision(before)
    monkeypatch.setattr(torch.backends.cuda, "matmul", types.SimpleNamespace())
    assert device.multiplies_in_tf32() is (before != "highest")


def test_random_numbers_of_ours_are_drawn_on_the_host_whatever_the_default_device_is(monkeypatch):
    torch.set_default_device("meta")
    try:
        model = torch.nn.Linear(100, 100, device="cpu")
        gradient_check.perturb(model, 1)
        watch = gradient_check.GradientWatch(model, world_size=1)
    finally:
        torch.set_default_device("cpu")
    assert model.weight.device.type == watch._parameters[0][1].device.type == "cpu"


class Accelerator:
    """DeepSpeed's face of devices of some kind."""

    def __init__(self, kind, n):
        self.device_count, self.current_device = lambda: n, lambda: 0
        self.device_name, self.total_memory, self.is_available = lambda: kind, lambda index: 32 << 30, lambda: n > 0
        self.available_memory = lambda: 31 << 30


@pytest.fixture
def accelerator(monkeypatch):
    """Makes DeepSpeed name another accelerator."""
    return lambda *given: monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: Accelerator(*given))


def test_devices_that_nothing_shows_are_an_error_and_neither_a_cpu_nor_one_device(monkeypatch, accelerator):
    accelerator("cuda", 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(
        UserError, match=r"'cuda', but no such device is visible \(CUDA_VISIBLE_DEVICES='-1'\); set DS_"
    ):
        device.found_devices()
    written = []
    monkeypatch.setattr(device.os, "dup", lambda _: 99)
    monkeypatch.setattr(device.os, "dup2", lambda *_: None)
    monkeypatch.setattr(device.os, "write", lambda _, line: written.append(json.loads(line)))
    assert device.main() == 0 and "no such device is visible" in written[0]["problem"]


def test_a_driver_too_old_for_torch_is_told_though_its_devices_can_be_counted(monkeypatch, accelerator):
    accelerator("cuda", 1)
    monkeypatch.setattr(torch.cuda, "init", raises)
    monkeypatch.setattr(device, "unused_device", lambda: "an NVIDIA GPU")
    with pytest.raises(
        UserError, match=r"an NVIDIA GPU, but torch .* cannot use it: The NVIDIA driver .* too old .*; or set DS_"
    ):
        device.found_devices()


@pytest.mark.parametrize(("kind", "looked_at"), [("cpu", ()), ("cuda", (0, 1))])
def test_devices_are_looked_at_only_where_trials_compute_on_them(monkeypatch, accelerator, kind, looked_at):
    accelerator(kind, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(inspect, "free_bytes", tuple)
    monkeypatch.setattr(inspect, "_environment", lambda: ENVIRONMENT)
    monkeypatch.setattr(inspect, "join", lambda: None)
    found = inspect.inspect_model(TrialRequest(target=str(MODELS / "ok.py")))
    assert found.environment.free_bytes == looked_at


def test_a_device_of_another_kind_has_its_own_name(accelerator, monkeypatch):
    accelerator("npu", 2)
    properties = types.SimpleNamespace(get_device_properties=lambda _: types.SimpleNamespace(name="Ascend910B3"))
    monkeypatch.setattr(torch, "npu", properties, raising=False)
    assert rank.device_name() == "Ascend910B3"
    assert [(each.name, each.memory_bytes) for each in device.found_devices().each] == [("Ascend910B3", 32 << 30)] * 2
    accelerator("cpu", 0)
    assert rank.device_name() == processor_name()


def test_amds_architecture_stands_for_a_capability(accelerator, monkeypatch):
    accelerator("cuda", 1)
    found = types.SimpleNamespace(name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-", major=9, minor=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    for hip, capability in (("6.2.41133", "gfx942"), (None, "9.4")):
        monkeypatch.setattr(torch.version, "hip", hip)
        assert device.device_of("cuda", 0).capability == capability


@pytest.mark.parametrize(("hip", "named"), [("6.2.41133", {"rocm": "6.2.41133"}), (None, {"cuda": "12.8"})])
def test_a_result_names_the_platform_that_torch_was_built_for(monkeypatch, accelerator, hip, named):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", None if hip else "12.8")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setattr(rank, "driver_version", lambda: "570.86")
    accelerator("cuda", 1)
    found = rank.versions()
    assert (
        found.items() >= (named | {"nccl": "2.27.3", "driver": "570.86"}).items()
        and len({"rocm", "cuda"} & set(found)) == 1
    )


@pytest.mark.parametrize(
    ("asked", "backend"), [(("cpu", 0), "gloo"), (("xpu", 1), "ccl"), (("npu", 1), "hccl"), (("hpu", 1), "hccl")]
)
def test_ranks_talk_by_the_backend_of_their_accelerator(accelerator, monkeypatch, asked, backend):
    accelerator(*asked)
    monkeypatch.setattr(Accelerator, "communication_backend_name", lambda _: backend, raising=False)
    assert rank._backend() == backend


@pytest.mark.parametrize(("limit", "share"), [(16 << 30, 0.5), (64 << 30, 1.0), (None, None)])
def test_a_rank_looks_at_its_device_before_it_takes_it_and_then_keeps_to_its_limit(
    monkeypatch, accelerator, limit, share
):
    done = []
    accelerator("cuda", 2)
    monkeypatch.setattr(Accelerator, "set_device", lambda _, index: done.append(index), raising=False)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: done.append(given))
    monkeypatch.setattr(rank, "DeviceWatch", lambda: done.append("looked"))
    monkeypatch.setattr(rank, "Memory", lambda kind, _: kind)
    monkeypatch.setattr(rank, "_identify", lambda *_: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setitem(vars(deepspeed.ops), "__compatible_ops__", {})
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    request = TrialRequest(target="model.py", device_memory_bytes=limit)
    assert rank.prepare_device(request, RankReport(rank=1)) == "cuda"
    assert done == ["looked", 1, *([(share, 1)] if share else [])]
    rank.watch_memory(None, request)  # of a device it is the allocator that keeps to the limit
    assert done[3:] == []
    accelerator("cuda", 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    with pytest.raises(
        UserError, match=r"2 ranks on a machine with 1 visible devices \(CUDA_VISIBLE_DEVICES='2'\): start"
    ):
        rank.prepare_device(request, RankReport(rank=1))


def test_a_server_that_has_touched_a_device_does_not_fork(monkeypatch):
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: True)
    assert preload._traces()[0] == "initialised XPU"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: False)
    assert preload._traces()[0] == "initialised CUDA"


def test_a_server_whose_forks_cannot_use_a_device_does_not_fork(monkeypatch, accelerator):
    accelerator("cuda", 1)
    monkeypatch.setattr(torch.cuda, "init", raises)
    with pytest.raises(RuntimeError, match="too old"):
        preload._start_device({})
    accelerator("cuda", 0)
    preload._start_device({})  # nothing to start
    accelerator("cuda", 1)
    monkeypatch.setattr(preload, "_traces", dict)
    monkeypatch.setattr(preload, "tried_in_a_fork", lambda _: "RuntimeError: Cannot re-initialize CUDA")
    assert (
        preload._unsafe_to_fork({})
        == "CUDA does not start in a forked process: RuntimeError: Cannot re-initialize CUDA"
    )
    monkeypatch.setattr(preload, "tried_in_a_fork", lambda _: None)
    assert preload._unsafe_to_fork({}) == ""
    accelerator("cpu", 0)
    monkeypatch.delattr(preload, "tried_in_a_fork")
    assert preload._unsafe_to_fork({}) == ""


def test_a_server_whose_forks_cannot_ask_for_free_memory_does_not_fork(monkeypatch):
    """ZeRO 1 and 2 ask NVML, which DeepSpeed starts where it is imported; a UUID it reads in no process."""
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    asked = types.SimpleNamespace(nvmlDeviceGetHandleByIndex=raises)
    for name, face in {"init": lambda: None, "is_available": lambda: True, "current_device": lambda: 0}.items():
        monkeypatch.setattr(torch.cuda, name, face)
    here = CUDA_Accelerator()
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: here)
    monkeypatch.setattr("deepspeed.accelerator.cuda_accelerator.pynvml", asked)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(RuntimeError, match="too old"):
        preload._start_device({})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6")
    preload._start_device({})


def test_a_server_counts_no_parts_of_cards_which_would_start_cuda_in_it(monkeypatch, accelerator):
    accelerator("cuda", 1)
    seen = []
    monkeypatch.setattr(torch.cuda, "init", lambda: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-5a1,MIG-7b2")
    parts = preload.hide_parts()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0" and preload.hide_parts() == {}
    preload._start_device(parts)
    assert seen == ["MIG-5a1,MIG-7b2"]


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_steps_are_traced_on_a_host_and_on_a_device(tmp_path, kind):
    tracer = trace.Tracer(tmp_path, 0, cuda=kind == "cuda")
    tracer.enter("forward")
    torch.ones(64, 64) @ torch.ones(64, 64)
    found = tracer.finish(1)
    assert (tmp_path / found.file).stat().st_size and found.spans_s["forward"] > 0
    assert bool(found.operations) is (kind == "cpu")  # without a device there is no kernel


@pytest.mark.parametrize(
    ("synchronized", "value", "said"),
    [(True, True, "no streams"), (True, False, "no streams"), (False, True, "stream")],
)
def test_nothing_overlaps_on_a_device_without_streams(accelerator, monkeypatch, synchronized, value, said):
    accelerator("xpu", 1)
    monkeypatch.setattr(Accelerator, "is_synchronized_device", lambda _: synchronized, raising=False)
    monkeypatch.setattr(Accelerator, "default_stream", lambda _: "own", raising=False)
    optimizer = types.SimpleNamespace(reduce_and_partition_stream="own")
    engine = types.SimpleNamespace(zero_optimization_stage=lambda: 3, optimizer=optimizer)
    found = witnesses._overlap(engine, value)
    assert said in found and isinstance(found, witnesses.Idle) is not value


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_script_that_asks_for_the_cpu_gets_deepspeed_on_one_and_keeps_its_wish_on_a_device(
    monkeypatch, tmp_path, on_cpu
):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "0")
    changes = []
    context = types.SimpleNamespace(
        memory=types.SimpleNamespace(on_cpu=on_cpu), scratch=tmp_path, candidate=None, request=TrialRequest(target="t"),
        value=lambda _: None, changed=changes.append,
    )  # fmt: skip
    given = {"cpu": True}
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")  # by `accelerate launch --cpu`
    partial = types.SimpleNamespace(_prepare_backend=None, __init__=None)
    adapter = accelerate._Adapter(context)
    adapter.on_state(types.SimpleNamespace(PartialState=partial))
    adapter._inject_deepspeed(given)
    assert given["cpu"] is not on_cpu and any("leave `cpu=True` out" in text for text in changes) is on_cpu
    assert any("leave `--cpu`" in text for text in changes) is on_cpu
    arguments = types.SimpleNamespace(
        use_cpu=True, deepspeed="ds.json", max_steps=-1, eval_strategy="no", save_strategy="no"
    )
    huggingface._Adapter(context)._prepare(arguments)
    assert arguments.use_cpu is not on_cpu
    lightnings = lightning._Adapter(context, "lightning")
    for name in ("_inject_deepspeed", "_leave_no_traces", "_lift_limits"):
        monkeypatch.setattr(lightnings, name, lambda _: None)
    seen = {}
    lightnings._trainer(lambda _, **given: seen.update(given), None)
    assert seen.get("accelerator") == ("cpu" if on_cpu else None) and seen["devices"] == 1


def test_lightning_is_told_of_all_machines_whose_ranks_it_counts(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    said = []
    context = types.SimpleNamespace(request=TrialRequest(target="t", world_size=4, nodes=2), once=said.append)
    given = {"devices": 2, "num_nodes": 2}
    lightning._Adapter(context, "lightning")._devices(given)
    assert given == {"devices": 2, "num_nodes": 2} and said == []


@pytest.mark.parametrize(
    ("given", "world_size", "said"),
    [({}, 2, True), ({}, 1, False), ({"use_cpu": True}, 2, False), ({"deepspeed": "ds.json"}, 2, True)],
)
def test_processes_that_transformers_would_train_apart_are_said_to_be(monkeypatch, tmp_path, given, world_size, said):
    """Under torchrun on a CPU without `--use_cpu` each of two ranks trains on all samples, with DeepSpeed, too."""
    caveats = []
    context = types.SimpleNamespace(
        memory=types.SimpleNamespace(on_cpu=True), scratch=tmp_path, candidate=None, value=lambda _: None, once=caveats.append,
        request=TrialRequest(target="t", world_size=world_size), changed=lambda _: None,
    )  # fmt: skip
    never = {"eval_strategy": "no", "save_strategy": "no"}
    plain = {"use_cpu": False, "deepspeed": None, "max_steps": -1, "fsdp": "", **never}
    huggingface._Adapter(context)._prepare(types.SimpleNamespace(**plain | given))
    assert caveats == [huggingface.APART] * said


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"evaluation_strategy": "epoch"}, {"evaluation_strategy": "steps", "eval_steps": huggingface.NEVER}),
        ({"evaluation_strategy": None, "eval_strategy": "no"}, {"evaluation_strategy": None, "eval_strategy": "no"}),
        ({"eval_strategy": "steps", "eval_steps": 5}, {"eval_strategy": "steps", "eval_steps": huggingface.NEVER}),
    ],
)
def test_trials_evaluate_never_by_whichever_name_of_the_argument(tmp_path, given, left):
    """Below transformers 4.41 it was `evaluation_strategy`, and each script of its Trainer ended in an AttributeError."""
    context = types.SimpleNamespace(
        memory=types.SimpleNamespace(on_cpu=False), scratch=tmp_path, candidate=None, value=lambda _: None,
        request=TrialRequest(target="t"), changed=lambda _: None,
    )  # fmt: skip
    arguments = types.SimpleNamespace(use_cpu=True, deepspeed="ds.json", max_steps=-1, save_strategy="no", **given)
    huggingface._Adapter(context)._prepare(arguments)
    assert left.items() <= vars(arguments).items() and arguments.save_strategy == "no"


@pytest.mark.parametrize(
    ("backend", "on_cpu", "world_size", "said"),
    [
        ("", True, 2, True),
        ("nccl", True, 2, True),
        ("gloo", True, 2, False),
        ("", True, 1, False),
        ("", False, 2, False),
    ],
)
def test_what_has_accelerate_share_out_the_samples_on_a_cpu_is_told(
    monkeypatch, tmp_path, backend, on_cpu, world_size, said
):
    """With DeepSpeed, as with nothing, Accelerate takes each process on a CPU for the only one."""
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    changes, caveats = [], []
    context = types.SimpleNamespace(
        memory=types.SimpleNamespace(on_cpu=on_cpu), changed=changes.append, once=caveats.append,
        request=TrialRequest(target="t", world_size=world_size),
    )  # fmt: skip
    handlers = [types.SimpleNamespace(backend=backend)] if backend else None
    accelerate._Adapter(context)._inject_deepspeed({"kwargs_handlers": handlers})
    assert changes == [accelerate.TOGETHER] * said and len(caveats) == said
    accelerate._Adapter(context)._inject_deepspeed({"kwargs_handlers": handlers, "cpu": True})
    assert len(caveats) == said, "with `cpu=True` its command trains them together, without DeepSpeed"


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_library_is_turned_to_the_cpu_only_on_one(on_cpu):
    context = types.SimpleNamespace(memory=types.SimpleNamespace(on_cpu=on_cpu))
    kind = type(
        "Kind",
        (),
        dict.fromkeys(("_prepare_backend", "_init_config_if_needed", "setup_environment", "__post_init__"), len),
    )
    module = types.SimpleNamespace(
        PartialState=kind, TrainingArguments=kind, DeepSpeedStrategy=kind, _validate_device_index_selection=len,
        is_torch_bf16_gpu_available=len, DistributedType=types.SimpleNamespace(MULTI_CPU=None), AcceleratorState=kind,
    )  # fmt: skip
    accelerate._Adapter(context).on_state(module)
    assert (kind._prepare_backend is len) is not on_cpu
    lightning._Adapter(context, "lightning").on_strategy(module)
    assert (module._validate_device_index_selection is len) is not on_cpu
    huggingface._Adapter(context).on_arguments(module)
    assert (module.is_torch_bf16_gpu_available is len) is not on_cpu


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (nixbld@)",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Thu Oct 16 20:23:13 UTC 2025",
    ],
)
def test_the_drivers_version_is_read_of_both_kinds_of_nvidias_module(monkeypatch, tmp_path, line):
    path = tmp_path / "version"
    path.write_text(f"{line}\nGCC version:  gcc version 15.3.0 (GCC)\n")
    ((_, pattern), *_) = device._DRIVERS.items()
    monkeypatch.setattr(device, "_DRIVERS", {str(path): pattern})
    assert device.driver_version() == "580.159.04"
