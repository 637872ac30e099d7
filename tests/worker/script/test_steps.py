"""What is noted of a script's steps."""

import torch

from autotune.worker.script import steps


def test_a_loss_that_a_script_reduces_in_place_counts_as_it_went_backward(monkeypatch):
    """A device's is read at the end of a window only, long after the script has summed it over ranks to print it."""
    monkeypatch.setattr(steps, "number_in", lambda tensor: tensor.detach().reshape(()))
    hooks = steps.StepHooks(None)
    for value in (2.0, 4.0):
        loss = torch.tensor(value)
        hooks._note_loss(loss)
        loss.mul_(8)
    assert float(hooks._total) == 6.0
