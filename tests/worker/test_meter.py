"""The ledger of steps: what loss scaling skips, in windows of several steps as CUDA is timed."""

import pytest
import torch

from autotune.trial import TrialRequest
from autotune.worker import meter
from autotune.worker.meter import Diverged, Meter
from autotune.worker.run import _Draft


@pytest.fixture
def ledger(monkeypatch):
    """A meter of one rank, without an engine."""
    monkeypatch.setattr(meter.dist, "all_gather", lambda rows, own: rows[0].copy_(own))
    made = Meter.__new__(Meter)
    made.request = TrialRequest(target="model.py", budget_s=1e6)
    made.report = _Draft(rank=1)
    made.device, made.elapsed_s, made.skipped, made.ragged = torch.device("cpu"), 0.0, 0, 0
    return made


def losses(n):
    return [torch.tensor(1.0)] * n


def test_one_skipped_update_in_a_long_window_costs_the_window_and_not_the_trial(ledger):
    for _ in range(3):  # the scale grows again and again, and is halved each time
        ledger.gather(0.1, 0.1, losses(100), skipped=1)
        assert ledger.report.step_times_s == []
    ledger.gather(0.1, 0.1, losses(100), skipped=0)
    assert len(ledger.report.step_times_s) == 100 and ledger.skipped == 0


def test_updates_that_are_skipped_without_end_diverge(ledger):
    for _ in range(meter.MOST_SKIPPED):
        ledger.gather(0.1, 0.1, losses(1), skipped=1)
    with pytest.raises(Diverged, match="31 updates were skipped"):
        ledger.gather(0.1, 0.1, losses(1), skipped=1)
