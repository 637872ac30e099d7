"""The steps of a `model.py` before those that are timed."""

from types import SimpleNamespace

import pytest
import torch

from autotune.worker.model import loop


def test_a_step_that_loss_scaling_skips_is_taken_apart_once_more(monkeypatch):
    """It has no update, so its phases say nothing of those that follow; fp16 skips some until it finds its scale."""
    trainer, left = loop._Trainer.__new__(loop._Trainer), iter([0, 2, 1, 0])
    windows = []
    ledger = SimpleNamespace(skipped=0, done=lambda: True)
    trainer.meter = SimpleNamespace(
        ledger=ledger, begin=lambda: windows.append("begin"), report=SimpleNamespace(), afterwards=list,
        finish=lambda: None, request=SimpleNamespace(save_weights=None, tail=None), device=torch.device("cpu"),
    )  # fmt: skip
    trainer.loader, trainer.stages = SimpleNamespace(close=lambda: None), None
    monkeypatch.setattr(loop.Tail, "of", lambda _: None)

    def window(n_steps, *, apart=False):
        windows.append(apart)
        ledger.skipped = next(left)

    trainer._train_window = window
    trainer.train()
    assert windows == [False, True, True, True, "begin"]


@pytest.fixture
def narrow_by_default():
    """What a model.py leaves that makes its weights in 16 bits so."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("shape", [(), (1,)])  # a loss of one element has one dimension in some models
def test_losses_are_added_up_in_fp32_whatever_type_a_model_leaves_as_the_default(narrow_by_default, shape):
    trainer = loop._Trainer.__new__(loop._Trainer)
    batches = SimpleNamespace(step=lambda: True)
    trainer.meter = SimpleNamespace(
        device=torch.device("cpu"), enter=lambda _: None, backward=lambda: None, update=lambda step: step(), batches=batches,
        recorder=SimpleNamespace(report=SimpleNamespace()), candidate=SimpleNamespace(gradient_accumulation_steps=1),
    )  # fmt: skip
    trainer.micro_clock = SimpleNamespace(start=lambda: None, lap=lambda _: None)
    trainer.engine, trainer.stages = SimpleNamespace(backward=lambda _: None, step=lambda: None), None
    trainer._draw, trainer.loss = (lambda: None), lambda *_: torch.full(shape, 1.001, dtype=torch.float32)
    assert float(trainer._step()) == pytest.approx(1.001)
