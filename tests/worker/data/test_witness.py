"""Whether the samples of a packed row are kept apart by the model that trains on them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autotune.worker.data import witness
from autotune.worker.data.padding import Texts
from autotune.worker.data.witness import why_mixed

TOKENS, POSITIONS = torch.tensor([[5, 6, 7, 8, 9, 4]]), torch.tensor([[0, 1, 2, 0, 1, 2]])


class Sums(nn.Module):
    """Sums what came before, of the whole row or of each sample."""

    def __init__(self, *, apart):
        super().__init__()
        self.apart, self.drop = apart, nn.Dropout(0.1)

    def forward(self, input_ids, position_ids):
        begins = (position_ids == 0).cumsum(1)
        allowed = (begins[:, :, None] == begins[:, None]) if self.apart else torch.ones(1, 6, 6, dtype=torch.bool)
        return {"logits": self.drop(allowed.tril().float() @ input_ids.float()[..., None]), "loss": torch.zeros(())}


def engine(*, apart):
    return SimpleNamespace(module=Sums(apart=apart))


@pytest.mark.parametrize("by_name", [True, False])
def test_a_model_whose_samples_see_one_another_in_a_row_is_told(by_name):
    args, kwargs = ((), {"input_ids": TOKENS, "position_ids": POSITIONS}) if by_name else ((TOKENS, POSITIONS), {})
    assert "see one another" in why_mixed(engine(apart=False), args, kwargs, TOKENS)
    assert why_mixed(engine(apart=True), args, kwargs, TOKENS) is None


def test_rows_that_are_split_over_ranks_are_padded_as_the_batch_is(monkeypatch):
    """Batches of 192 tokens, half of them on each of two ranks, were no multiples of 64."""
    texts = Texts(None, shards=2)
    texts.note(torch.ones(2, 96, dtype=torch.long), (), {"attention_mask": torch.ones(2, 96)}, first=True)
    monkeypatch.setattr(witness.watch, "batches", SimpleNamespace(texts=texts))
    assert witness.witness("pad_to_multiple_of")(None, 64) is None
    assert witness.witness("pad_to_multiple_of")(None, 128) == "a batch is padded to 192 tokens"


def test_a_row_of_one_sample_tells_nothing():
    kwargs = {"input_ids": TOKENS, "position_ids": torch.arange(6)[None]}
    assert why_mixed(engine(apart=False), (), kwargs, TOKENS) is None


def test_packing_did_not_act_where_samples_are_mixed(monkeypatch):
    kwargs = {"input_ids": TOKENS, "position_ids": POSITIONS}
    batches = SimpleNamespace(rows=lambda: {(1, 2)}, texts=SimpleNamespace())
    monkeypatch.setattr(witness.watch, "batches", batches)
    for apart in (True, False):
        batches.texts.row = (), kwargs, TOKENS
        assert (witness.witness("packing")(engine(apart=apart), True) is None) is apart
