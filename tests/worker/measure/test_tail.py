"""The tail check in real ranks: the longest samples, an evaluation, a checkpoint, and what does not fit."""

import pytest

from autotune.trial.request import TailCheck
from autotune.trial.result import Outcome

pytestmark = pytest.mark.process

LENGTHS = ((16.0, 100), (2048.0, 1))
MODEL = """
    import torch
    from torch import nn

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.e, self.f, self.o = nn.Embedding(64, 32), nn.Linear(32, 4096), nn.Linear(4096, 64)

        def forward(self, x):
            return self.o(torch.relu(self.f(self.e(x))))

    def model():
        return Wide()

    def data():
        return [torch.arange(n) % 60 + 1 for n in [16] * 100 + [2048]]

    def collate(samples):
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    def loss(model, x):
        return nn.functional.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())
"""


def test_the_longest_batch_an_evaluation_and_a_checkpoint_are_tried_after_the_measurement(zoo, write_model):
    check = TailCheck(longest_at=(100,), evaluate=True, save=True)
    # Position 100 is never drawn: the tail is what the trial itself would not have met.
    result = zoo.run(write_model(MODEL), micro=2, world_size=1, max_steps=3, tail=check, lengths=LENGTHS)
    assert result.outcome is Outcome.COMPLETE, result.reason
    assert result.tail == {"samples": 2, "length": 2048, "elements": 2 * 2048}
    by_phase = result.memory_by_phase_bytes
    assert by_phase["tail"] > by_phase["step"] + 2 * 2048 * 4096 * 4
    assert result.peak_memory_bytes == by_phase["tail"] and {"evaluate", "save"} <= by_phase.keys()
    assert not (zoo.folder.scratch / "checkpoint").exists()


def test_a_token_budget_fills_batches_and_its_worst_one_is_of_the_longest_sample(zoo, write_model):
    check = TailCheck(longest_at=(100,))
    result = zoo.run(
        write_model(MODEL), micro=4, max_steps=12, tail=check, lengths=LENGTHS, changed_from={"data.token_budget": None},
        **{"data.token_budget": True},
    )  # fmt: skip
    assert result.outcome is Outcome.COMPLETE, result.reason
    assert result.observed.uneven is not None and result.samples_per_step == 8
    assert result.tail == {"samples": 1, "length": 2048, "elements": 2048}
    assert any("a batch sampler that fills each micro-batch" in change for change in result.side_changes)


def test_a_longest_batch_that_does_not_fit_is_out_of_memory_and_says_which(zoo, write_model):
    check = TailCheck(longest_at=(100,))
    result = zoo.run(
        write_model(MODEL),
        micro=16,
        world_size=1,
        max_steps=3,
        tail=check,
        lengths=LENGTHS,
        device_memory_bytes=400 << 20,
    )
    assert result.outcome is Outcome.OOM and result.failed_check
    assert result.reason.startswith("the longest batch (16 samples of up to 2,048) does not fit: ")
