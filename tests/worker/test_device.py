"""Where a device is not used, one sentence says why; what ranks do only on a CPU is left out on any accelerator."""

import types

import pytest
import torch

from autotune.worker import device
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
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    assert device._why_cpu() == ""


def test_a_server_that_has_touched_a_device_does_not_fork(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert preload._traces()[0] == "initialised CUDA"


def test_a_server_whose_forks_cannot_use_cuda_does_not_fork(monkeypatch):
    monkeypatch.setattr(preload, "_traces", dict)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(preload, "tried_in_a_fork", lambda _: "RuntimeError: Cannot re-initialize CUDA")
    assert (
        preload._unsafe_to_fork() == "CUDA does not start in a forked process: RuntimeError: Cannot re-initialize CUDA"
    )
    monkeypatch.setattr(preload, "tried_in_a_fork", lambda _: None)
    assert preload._unsafe_to_fork() == ""


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
