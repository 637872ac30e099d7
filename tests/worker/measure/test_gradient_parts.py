"""Where the check of the first gradient reads it, on one process; `test_gradient_check.py` has real trials."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autotune.scoring.convergence.quality_gate import judge_gradient
from autotune.worker.measure import gradient_check


@pytest.mark.parametrize(
    ("orders", "numel", "looked_at"), [([[0, 1]], 6, True), ([[1, 0]], 6, False), ([], 5, False), ([], 3, True)]
)
def test_a_gradient_is_read_only_where_every_rank_finds_its_part(monkeypatch, orders, numel, looked_at):
    """One rank that fails while the others wait for it in a collective would end the trial."""
    read = []
    utils = SimpleNamespace(safe_get_full_grad=lambda parameter: read.append(parameter) or parameter.grad)
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(utils=utils))
    monkeypatch.setitem(sys.modules, "deepspeed.utils", utils)
    monkeypatch.setattr(gradient_check.dist, "all_reduce", lambda _: None)
    model = nn.Linear(3, 2)
    watch = gradient_check.GradientWatch(model, world_size=1)
    model(torch.ones(4, 3)).sum().backward()
    model.weight._index_in_param_group = 0
    model.weight._hp_mapping = SimpleNamespace(
        get_lp_grad_fragment=lambda _: torch.zeros(numel), lp_fragment_address=SimpleNamespace(numel=3)
    )
    optimizer = SimpleNamespace(round_robin_bit16_indices=orders)
    watch.backward(SimpleNamespace(device="cpu", is_gradient_accumulation_boundary=lambda: True, optimizer=optimizer))
    assert watch.done and bool(read) is looked_at
    assert (watch.found is not None and watch.found.error == pytest.approx(0)) is looked_at


@pytest.fixture
def stepped(monkeypatch):
    """Takes a step of a model on a batch; returns the watch that was set on it."""
    utils = SimpleNamespace(safe_get_full_grad=lambda parameter: parameter.grad)
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(utils=utils))
    monkeypatch.setitem(sys.modules, "deepspeed.utils", utils)
    monkeypatch.setattr(gradient_check.dist, "all_reduce", lambda _: None)

    def step(watch, model, batch, **optimizer: object) -> gradient_check.GradientWatch:
        model.zero_grad()
        model(batch).sum().backward()
        watch.backward(
            SimpleNamespace(
                device="cpu", is_gradient_accumulation_boundary=lambda: True, optimizer=SimpleNamespace(**optimizer)
            )
        )
        return watch

    return step


@pytest.fixture
def watched(stepped):
    """Takes steps of one model whose inputs are given; returns its watch."""
    model = nn.Linear(3, 2)
    watch = gradient_check.GradientWatch(model, world_size=1)
    return lambda value, **optimizer: stepped(watch, model, torch.full((4, 3), value), **optimizer)


def test_a_sparse_gradient_is_compared_as_the_dense_one_that_it_stands_for(stepped):
    """The look at it ended every trial of a model whose embedding has sparse gradients."""
    model = nn.Embedding(9, 2, sparse=True)
    watch = stepped(gradient_check.GradientWatch(model, world_size=1), model, torch.tensor([3, 3, 5]))
    assert watch.found.error == 0 and watch.found.norm == pytest.approx((2 * 2**2 + 2 * 1**2) ** 0.5)


@pytest.mark.parametrize(
    "scaled", [{"cur_scale": 4.0}, {"torch_autocast_gradscaler": SimpleNamespace(get_scale=lambda: 4.0)}]
)
def test_a_step_that_overflows_while_fp16_looks_for_its_scale_is_not_looked_at(watched, scaled):
    """It changes no weight. Its gradient is not finite, and a report cannot hold such numbers."""
    assert not watched(float("inf"), **scaled).done
    watch = watched(1.0, **scaled)
    assert watch.done and watch.found.error == pytest.approx(0) and watch.found.n_micro == 1
    # Six weights with a gradient of 4 each and two biases with the same, at a scale of 4.
    assert watch.found.norm == pytest.approx(8**0.5)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_is_told_in_numbers_that_a_report_holds(watched, value):
    watch = watched(value)
    assert watch.done and "not finite" in judge_gradient(watch.found, None, {})
    json.dumps(vars(watch.found), allow_nan=False)


def test_all_ranks_send_one_type_whatever_default_type_a_script_has_set(monkeypatch):
    """One whose parameters got no gradient sent zeros of the default type, which the others waited for in vain."""
    sent = []
    monkeypatch.setattr(gradient_check.dist, "all_reduce", lambda tensor: sent.append(tensor.dtype))
    watch = gradient_check.GradientWatch(nn.Linear(3, 2), world_size=1)
    engine = SimpleNamespace(device="cpu", is_gradient_accumulation_boundary=lambda: True, optimizer=SimpleNamespace())
    torch.set_default_dtype(torch.bfloat16)
    try:
        watch.backward(engine)
    finally:
        torch.set_default_dtype(torch.float32)
    assert sent == [torch.float32]
