"""Lengths of rows in batches, and what a step takes in on average over the data set."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.scoring.rates import as_expected, total_rate
from autotune.trial import lengths, token_budget
from autotune.worker.data.padding import Texts, expected, padding_id, real_lengths
from autotune.worker.data.samples import length_of, real_mask

IDS = torch.tensor([[5, 6, 7, 0], [5, 0, 0, 0]])
INPUTS = {
    "mask": ({"input_ids": IDS, "attention_mask": (IDS > 0).long()}, None),
    "padding mask of torch": ({"input_ids": IDS, "src_key_padding_mask": IDS == 0}, None),
    "padding mask of ones": ({"input_ids": IDS, "padding_mask": (IDS > 0).long()}, None),
    "stated lengths": ({"input_ids": IDS, "lengths": torch.tensor([3, 1])}, None),
    "padding token": ({"input_ids": IDS}, 0),
    "labels": ({"input_ids": IDS, "labels": torch.tensor([[-100, 6, 7, -100], [5, -100, -100, -100]])}, None),
}


@pytest.mark.parametrize(("inputs", "padding"), INPUTS.values(), ids=INPUTS)
def test_rows_are_as_long_as_what_is_no_padding(inputs, padding):
    found = real_lengths(IDS, (inputs,), {}, padding)
    assert found is not None and found.tolist() == [3, 1]


@pytest.mark.parametrize("pads_are_true", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_what_a_padding_mask_means_shows_at_the_ends_of_its_longest_row(pads_are_true, left):
    real = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    real = real.flip(1) if left else real
    found = real_mask({"pad_mask": ~real if pads_are_true else real}, real.shape)
    assert found.equal(real)
    assert length_of({"ids": [1, 2, 3], "padding_mask": [0, 0, 1] if pads_are_true else [1, 1, 0]}) == 2


def test_without_evidence_nothing_is_said_of_padding():
    assert real_lengths(IDS, (IDS,), {}, None) is None
    assert padding_id(nn.Embedding(4, 2)) is None and padding_id(nn.Embedding(4, 2, padding_idx=3)) == 3


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_micro_batch_of_one_row_is_noted_without_a_copy_from_the_host():
    """A device would be waited for in each of its timed steps."""
    tokens, texts = torch.arange(8).view(1, 8), Texts(None)
    with Operations() as seen:
        assert texts.note(tokens, (tokens,), {}, first=True) == (8, 8) and texts.lengths == [([8], 8)]
    assert seen.names and not [name for name in seen.names if "lift_fresh" in name]


def batches(known: lengths.Table, n: int, micro: int, width=lambda rows: int(rows.max())):
    values, counts = zip(*known, strict=True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(n):
        picked = torch.multinomial(
            torch.tensor(counts, dtype=torch.float), micro, replacement=True, generator=generator
        )
        rows = torch.tensor(values)[picked].long()
        yield rows, width(rows)


RARE = lengths.table([64] * 499 + [2048])


def test_the_mean_step_follows_from_the_data_set_although_a_trial_saw_no_long_sample():
    seen = [(torch.full((4,), 64), 64)] * 20
    found = expected(RARE, seen, 4, {})
    assert found["real_tokens"] == pytest.approx(4 * (64 * 499 + 2048) / 500)
    assert found["tokens"] == pytest.approx(4 * (64 + (1 - 0.998**4) * (2048 - 64)))


def test_rows_that_a_script_flattens_itself_are_told_by_the_sum_of_their_samples():
    known = lengths.table([16] * 50 + [64] * 50)
    rows = [(torch.tensor([4 * 40 + n]), 4 * 40 + n) for n in (-8, 0, 8)]
    assert expected(known, rows, 4, {}, flattened=True) == {"tokens": 4 * 40, "real_tokens": 4 * 40}
    assert expected(known, rows, 4, {}) == {}


def test_grouped_samples_are_padded_less():
    known = lengths.table([16] * 50 + [64] * 50)
    seen = list(batches(known, 50, 4))
    plain, grouped = (expected(known, seen, 4, {}, n) for n in (1, 4))
    assert grouped["tokens"] < 0.85 * plain["tokens"] and grouped["real_tokens"] == plain["real_tokens"]


def test_nothing_is_expected_where_padding_does_not_follow_from_the_lengths():
    known = lengths.table([16] * 50 + [64] * 50)
    fixed = list(batches(known, 50, 4, width=lambda _: 512))
    characters = lengths.table([80] * 50 + [320] * 50)
    assert expected(known, fixed, 4, {}) == {} == expected(characters, list(batches(known, 50, 4)), 4, {})


@pytest.mark.parametrize("two", [(30, 400), (16, 512)])
def test_the_rate_of_a_token_budget_holds_for_the_long_run_although_a_trial_saw_a_few_batches(two):
    rng = np.random.default_rng(0)
    known = lengths.table(rng.choice(two, 4000))
    tokens = token_budget.tokens_for(known, 8)
    drawn = ((int(length), int(length)) for _ in range(4) for length in rng.choice(two, 4000))
    batches = list(itertools.islice(token_budget.fill(drawn, tokens, 256), 1000))
    sizes = np.array([len(batch) * max(batch) for batch in batches], dtype=float)
    times = 0.02 + 1e-4 * sizes * rng.lognormal(0, 0.03, len(sizes))
    seen = [(torch.tensor(batch), max(batch)) for batch in batches[:30]]
    mean = expected(known, seen, 8, {"token_budget": True})
    claim = total_rate(as_expected(times[:30], sizes[:30], mean["tokens"]), [mean["samples"]] * 30)
    assert claim.value == pytest.approx(sum(map(len, batches)) / times.sum(), rel=0.05)
    assert sum(map(len, batches[:30])) / times[:30].sum() != pytest.approx(claim.value, rel=0.05)
