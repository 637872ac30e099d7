"""Token budgets: what fills a batch, and the mean batch that follows from the lengths."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from autotune.trial import lengths, token_budget

CORPORA = {
    "log-normal": np.exp(np.random.default_rng(0).normal(4, 0.9, 2000)).astype(int) + 1,
    "bimodal": np.where(np.arange(2000) % 2, 30, 300),
    "one in 500": np.where(np.arange(2000) % 500, 16, 512),
}


@pytest.mark.parametrize("corpus", CORPORA)
@pytest.mark.parametrize("micro", [2, 16])
def test_the_budget_for_a_mean_batch_holds_so_many_samples_with_little_padding(corpus, micro):
    known = lengths.table(CORPORA[corpus])
    tokens = token_budget.tokens_for(known, micro)
    mean = token_budget.filled(known, tokens, micro)
    assert mean.samples == pytest.approx(micro, rel=0.15)
    assert mean.samples * lengths.expected(known) > 0.9 * mean.tokens and mean.tokens <= max(tokens, 512)


def test_every_sample_comes_once_and_the_first_batches_are_like_later_ones():
    drawn = CORPORA["log-normal"].tolist()
    found = list(token_budget.fill(((each, number) for number, each in enumerate(drawn)), 400, 64))
    assert sorted(itertools.chain(*found)) == list(range(2000))
    assert all(len(batch) == 1 or len(batch) * max(drawn[number] for number in batch) <= 400 for batch in found)
    early, late = (sum(map(len, part)) / len(part) for part in (found[:100], found[100:-30]))
    assert early == pytest.approx(late, rel=0.15)


def test_settings_of_the_data_change_what_a_sample_is_padded_to():
    assert token_budget.padded(((3.0, 1), (40.0, 2)), {"max_length": 20, "pad_to_multiple_of": 8}) == (
        (8.0, 1),
        (24.0, 2),
    )


def test_the_guides_batch_sampler_keeps_to_the_budget_and_shares_the_samples_out():
    text = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
    before, _, after = text.partition("class TokenBatches")
    names = {}
    exec(before.rpartition("```python\n")[2] + "class TokenBatches" + after.partition("\n\n\nloader = ")[0], names)
    drawn = CORPORA["log-normal"].tolist()
    shares = [list(names["TokenBatches"](drawn, 600, rank, 2)) for rank in (0, 1)]
    batches = [batch for share in shares for batch in share]
    assert len(shares[0]) == len(shares[1]) and all(
        len(b) * max(drawn[i] for i in b) <= 600 or len(b) == 1 for b in batches
    )
    seen = sorted(itertools.chain(*batches))
    assert len(seen) == len(set(seen)) > 0.98 * len(drawn)
