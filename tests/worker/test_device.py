"""Where a device is not used, one sentence says why; what ranks do only on a CPU is left out on any accelerator."""

import json
import os
import types

import pytest
import torch

from autotune.errors import UserError
from autotune.system.machine import processor_name
from autotune.worker import device, rank
from autotune.worker.agent import preload
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


class Accelerator:
    """DeepSpeed's face of devices of some kind."""

    def __init__(self, kind, n):
        self.device_count, self.current_device = lambda: n, lambda: 0
        self.device_name, self.total_memory, self.is_available = lambda: kind, lambda index: 32 << 30, lambda: n > 0


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


def test_a_device_of_another_kind_has_its_own_name(accelerator, monkeypatch):
    accelerator("npu", 2)
    properties = types.SimpleNamespace(get_device_properties=lambda _: types.SimpleNamespace(name="Ascend910B3"))
    monkeypatch.setattr(torch, "npu", properties, raising=False)
    assert rank.device_name() == "Ascend910B3"
    assert [(each.name, each.memory_bytes) for each in device.found_devices().each] == [("Ascend910B3", 32 << 30)] * 2
    accelerator("cpu", 0)
    assert rank.device_name() == processor_name()


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


def test_a_server_counts_no_parts_of_cards_which_would_start_cuda_in_it(monkeypatch, accelerator):
    accelerator("cuda", 1)
    seen = []
    monkeypatch.setattr(torch.cuda, "init", lambda: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-5a1,MIG-7b2")
    parts = preload.hide_parts()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0" and preload.hide_parts() == {}
    preload._start_device(parts)
    assert seen == ["MIG-5a1,MIG-7b2"]


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
