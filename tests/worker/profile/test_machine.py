"""The speed of the machine at length, as one rank measures it, with hardly any time for each figure."""

import pytest
import torch

from autotune.trial.folder import TrialDir, read_record
from autotune.trial.links import Probe
from autotune.trial.profile import Machine
from autotune.trial.request import TrialRequest
from autotune.worker.measure.memory import Memory
from autotune.worker.measure.recorder import Recorder
from autotune.worker.profile import machine


@pytest.fixture
def alone(monkeypatch):
    """A rank without others, in this process."""
    monkeypatch.setattr(machine, "prepare_device", lambda *_: Memory("cpu"))
    monkeypatch.setattr(machine, "connect", lambda *_, **__: None)
    monkeypatch.setattr(machine.dist, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(machine.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(machine, "_host_memory", lambda *_: (1e6, 2e6))
    for name, value in {"BUDGET_S": {"cpu": 0.01, "cuda": 0.01}, "LOADER_S": 0.0, "LOADER_WORKERS": (0,)}.items():
        monkeypatch.setattr(machine, name, value)
    monkeypatch.setitem(machine.MATRICES, "cpu", (16, 32))
    monkeypatch.setitem(machine.MATRIX, "cpu", 16)
    for sizes in (machine.COPIED_BYTES, machine.OPTIMISED):
        monkeypatch.setitem(sizes, "cpu", 1 << 12)


@pytest.mark.parametrize("mode", ["rates", "machine"])
def test_a_device_that_multiplies_in_no_bf16_has_all_other_rates(alone, monkeypatch, tmp_path, mode):
    product = machine._product

    def without(device, name, n):
        if name == "bf16":
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`")
        return product(device, name, n)

    monkeypatch.setattr(machine, "_product", without)
    request = TrialRequest(target="", world_size=1, mode=mode)
    machine.measure_machine(Recorder(TrialDir(tmp_path), 0), request)
    if mode == "rates":
        rates = read_record(TrialDir(tmp_path).machine, Machine).flops
        assert rates["torch_autocast"] == rates["fp32"] > 0 and "bf16" not in rates
    else:
        probe = read_record(TrialDir(tmp_path).probe, Probe)
        assert probe.machine.flops["torch_autocast"] > 0 and "no matrix product in bf16" in probe.caveats[0]


def test_a_device_that_multiplies_in_no_fp32_is_told_by_its_own_error(alone, monkeypatch, tmp_path):
    """It was a KeyError: 'fp32'."""

    def full(*_):
        raise RuntimeError("CUDA error: the device is full")

    monkeypatch.setattr(machine, "_product", full)
    with pytest.raises(RuntimeError, match="the device is full"):
        machine.measure_machine(Recorder(TrialDir(tmp_path), 0), TrialRequest(target="", world_size=1, mode="rates"))


def test_a_probe_holds_every_rate_and_names_the_processor(alone, tmp_path):
    request = TrialRequest(target="", world_size=1, mode="machine")
    machine.measure_machine(Recorder(TrialDir(tmp_path), 0), request)
    found = read_record(TrialDir(tmp_path).probe, Probe)
    assert {"fp32", "bf16"} <= set(found.flops) and "tf32" not in found.flops and set(found.sizes.values()) <= {16, 32}
    assert found.threads == torch.get_num_threads() and found.device_name and found.links == ()
    rates = found.machine
    assert min(rates.memory_bytes_per_s, rates.host_bytes_per_s, rates.host_op_s, rates.optimizer_bytes_per_s) > 0
    assert rates.op_s >= rates.host_op_s  # on a CPU both are measured there
    assert (rates.workspace_bytes, rates.kernel_bytes, rates.accelerator) == (1e6, 2e6, "cpu")
    assert [each.n_workers for each in found.loader] == [0] and found.data is None
