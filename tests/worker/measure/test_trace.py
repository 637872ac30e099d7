"""Summary of a trace: operations by phase and kind, by kernels on a device, and messages hidden behind computing."""

from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from autotune.worker.measure.trace import MARK, summary


def event(name, start, end, *, kernels=(), own=None, children=(), on=DeviceType.CPU):
    """An event as torch's profiler gives it, in microseconds."""
    return SimpleNamespace(
        name=name,
        device_type=on,
        time_range=SimpleNamespace(start=start, end=end),
        kernels=[SimpleNamespace(duration=duration) for duration in kernels],
        self_cpu_time_total=end - start if own is None else own,
        cpu_children=list(children),
        is_user_annotation=name.startswith((MARK, "Optimizer.")),
    )


def test_on_a_host_time_is_that_of_operations_themselves():
    product = event("aten::addmm", 110, 190)
    found = summary(
        [
            event(MARK + "forward", 100, 300, own=20),
            event("aten::linear", 105, 195, own=10, children=[product]), product,
            event("aten::add_", 200, 260), event("aten::t", 265, 268), event("aten::mul", 20, 90),
            event(MARK + "step", 400, 460),
            event("aten::mul", 410, 450),
        ],
        2, cuda=False, file="t",
    )  # fmt: skip
    forward = {kind: seconds * 2e6 for kind, seconds in found.kinds_s["forward"].items()}
    # What lies outside the phases is nobody's; `linear` itself and `t` are too short to be worth their fixed cost.
    assert forward == pytest.approx({"products": 80, "traffic": 60, "short": 13, "messages": 0})
    assert found.kinds_s["step"]["traffic"] * 2e6 == pytest.approx(40) and found.spans_s[
        "forward"
    ] * 2e6 == pytest.approx(200)
    assert [each.name for each in found.operations] == [
        "aten::addmm",
        "aten::add_",
        "aten::mul",
        "aten::linear",
        "aten::t",
    ]
    assert found.operations[0].seconds == pytest.approx(40e-6) and found.operations[0].calls == 0.5


def test_on_a_device_time_is_that_of_the_kernels_that_an_operation_started():
    cuda = DeviceType.CUDA
    found = summary(
        [
            event(MARK + "backward", 0, 100), event("aten::mm", 1, 3, kernels=[60]),
            event("aten::add", 5, 6, kernels=[20, 10]),
            event("aten::fill_", 7, 8, kernels=[2]), event("c10d::allreduce_", 9, 12, kernels=[40]),
            event("gemm", 10, 70, on=cuda), event("elementwise", 70, 80, on=cuda),
            event("ncclDevKernel_AllReduce", 50, 90, on=cuda),
            event(MARK + "backward", 10, 95, on=cuda), event("Optimizer.step#AdamW.step", 10, 95, on=cuda),
        ],
        1, cuda=True, file="t",
    )  # fmt: skip
    assert found.kinds_s["backward"] == pytest.approx(
        {"products": 60e-6, "traffic": 30e-6, "short": 2e-6, "messages": 10e-6}
    )
    assert (found.messages_s, found.hidden_s) == (pytest.approx(40e-6), pytest.approx(30e-6))


def test_waiting_for_a_message_on_a_host_is_no_operation():
    found = summary(
        [
            event(MARK + "backward", 0, 100), event("aten::mm", 0, 40), event("c10d::allreduce_", 40, 42, own=2),
            event("gloo:all_reduce", 30, 80, own=0), event("aten::mm", 80, 100, own=30),
        ],
        1, cuda=False, file="t",
    )  # fmt: skip
    assert found.kinds_s["backward"]["messages"] == pytest.approx(40e-6)
    assert (found.messages_s, found.hidden_s) == (pytest.approx(50e-6), pytest.approx(10e-6))
