"""The steps of a `model.py` before those that are timed."""

from types import SimpleNamespace

from autotune.worker.model import loop


def test_a_step_that_loss_scaling_skips_is_taken_apart_once_more(monkeypatch):
    """It has no update, so its phases say nothing of those that follow; fp16 skips some until it finds its scale."""
    trainer, left = loop._Trainer.__new__(loop._Trainer), iter([0, 2, 1, 0])
    windows = []
    ledger = SimpleNamespace(skipped=0, done=lambda: True)
    trainer.meter = SimpleNamespace(
        ledger=ledger, begin=lambda: windows.append("begin"), report=SimpleNamespace(), afterwards=list,
        finish=lambda: None, request=SimpleNamespace(save_weights=None, tail=None),
    )  # fmt: skip
    trainer.micro_clock = SimpleNamespace(forget=lambda: None, medians_s=dict)
    trainer.loader, trainer.stages = SimpleNamespace(close=lambda: None), None
    monkeypatch.setattr(loop.Tail, "of", lambda _: None)

    def window(n_steps, *, apart=False):
        windows.append(apart)
        ledger.skipped = next(left)

    trainer._train_window = window
    trainer.train()
    assert windows == [False, True, True, True, "begin"]
