"""Where the check of the first gradient reads it, on one process; `test_gradient_check.py` has real trials."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

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
