"""The loader of a model.py under changes of the data, and whether each of them is seen to act."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from autotune.space.candidate import Candidate
from autotune.worker.containers import tensors_in
from autotune.worker.data import witness, worst
from autotune.worker.data.change import BATCH_CHANGES, Collate, apply_to, packed, why_not
from autotune.worker.data.loader import Loader
from autotune.worker.data.samples import describe
from autotune.worker.model.model_file import WorkloadError
from autotune.worker.profile.model import _batches

DATA = [{"input_ids": torch.arange(1, n + 1)} for n in (3, 9, 5, 7, 2, 8, 6, 4)]


def collate(samples):
    ids = nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def loader(changes=None, data=DATA, **what):
    target = SimpleNamespace(path=Path("model.py"), data=lambda: data, batch=None, collate=collate)
    return Loader(
        target, **{"micro_batch_size": 2, "rank": 0, "world_size": 1, "seed": 0, **what}, changes=changes or {}
    )


def tokens(batch):
    return sorted(batch["input_ids"][batch["labels"] != -100].tolist())


def test_a_packed_batch_holds_the_same_tokens_in_one_row_with_positions_that_begin_anew():
    plain, one = loader().next()[0], loader({"packing": True}).next()[0]
    assert one["input_ids"].shape == (1, int(plain["attention_mask"].sum())) and "attention_mask" not in one
    assert (one["position_ids"] == 0).sum() == 2
    assert (one["labels"] == -100).sum() == 2, "no loss is taken of the first token of a sample, as in padded rows"


def test_grouping_keeps_the_samples_of_a_step_and_pads_them_less():
    plain, grouped = (
        [one.next()[0] for _ in range(4)]
        for one in (loader(accumulation=4), loader({"group_by_length": True}, accumulation=4))
    )
    assert sorted(token for b in plain for token in tokens(b)) == sorted(token for b in grouped for token in tokens(b))
    assert sum(b["input_ids"].numel() for b in grouped) < sum(b["input_ids"].numel() for b in plain)


def test_texts_are_grouped_by_the_tokens_that_the_targets_collate_makes_of_them():
    texts = ["lengthy " * n for n in (1, 2)] + ["a " * n for n in (3, 4)]
    made = loader({"group_by_length": True}, data=texts, micro_batch_size=1, accumulation=4)
    made._own = made.collate.own = lambda texts: collate([{"input_ids": torch.ones(len(t.split()))} for t in texts])
    assert [made.next()[0]["input_ids"].shape[1] for _ in texts] == [1, 2, 3, 4]


def test_samples_are_cut_before_the_targets_collate_or_by_it_if_it_takes_the_argument():
    assert loader({"max_length": 4}, micro_batch_size=8).next()[0]["input_ids"].shape == (8, 4)
    own = Collate(lambda samples, max_length=None: max_length, {"max_length": 4})
    assert own([1, 2]) == 4 and not own.length


def test_a_collator_that_gives_positions_is_packed_with_those_of_the_row():
    one = packed(
        collate([sample]) | {"position_ids": torch.arange(len(sample["input_ids"]))[None]} for sample in DATA[:2]
    )
    assert one["position_ids"].tolist() == [[*range(3), *range(9)]]


def test_a_generator_is_made_anew_when_it_is_read_to_its_end():
    """Also one that inspection has read to its end before the first batch."""

    def made():
        target = SimpleNamespace(path=Path("model.py"), data=lambda: iter(DATA), batch=None, collate=collate)
        return Loader(target, micro_batch_size=2, rank=0, world_size=1, seed=0)

    one, other = made(), made()
    assert len([*other.samples()]) == len(DATA)
    for loaded in (one, other):
        assert [len(loaded.next()[0]["input_ids"]) for _ in range(10)] == [2] * 10
    with pytest.raises(WorkloadError, match="yields no sample"):
        loader(data=iter(())).next()


def test_the_order_of_the_samples_is_drawn_on_the_host_whatever_the_default_device_is():
    plain = [loader()._index(i) for i in range(8)]
    torch.set_default_device("meta")
    try:
        assert [loader()._index(i) for i in range(8)] == plain
    finally:
        torch.set_default_device("cpu")


def test_a_data_set_without_a_length_is_read_in_order():
    class Positions:
        def __getitem__(self, position):
            return DATA[position]

    first = loader(data=Positions())
    assert first.n_samples is None and [len(first.next()[0]["input_ids"]) for _ in range(5)] == [2] * 5
    with pytest.raises(WorkloadError, match="data\\(\\) returned int"):
        loader(data=3)


def test_texts_are_as_long_as_the_tokens_that_the_collate_function_makes_of_them():
    def words(samples):
        ids = [torch.tensor([len(word) for word in sample.split()]) for sample in samples]
        return {"input_ids": nn.utils.rnn.pad_sequence(ids, batch_first=True)}

    texts = ["one two three", "a", "internationalisation"]
    found = describe(texts, collate=words)
    assert found.table == ((1.0, 2), (3.0, 1)) and found.longest_at[0] == 0
    assert worst.batch_of(texts, words, found.longest_at, 2, 6)["input_ids"].shape == (2, 6)
    assert "samples are text" in why_not(texts, words, None, mapped=True, loader=False)["max_length"]


@pytest.mark.process
def test_workers_load_the_same_batches_in_the_same_order():
    plain, background = loader(), loader({"num_workers": 1, "prefetch_factor": 3})
    try:
        for _ in range(3):
            assert torch.equal(plain.next()[0]["input_ids"], background.next()[0]["input_ids"])
        witness.watch.loader = background
        assert witness.witness("num_workers")(None, 1) is None
        assert witness.witness("prefetch_factor")(None, 3) is None
        assert witness.witness("num_workers")(None, 4) == "4 was asked for, 1 ran"
    finally:
        witness.watch.loader = None
        background.close()


def test_a_loader_hands_on_batches_as_the_collate_function_makes_them():
    """Torch's default turned tuples into lists and arrays into tensors, which a model.py's own loss need not take."""
    target = SimpleNamespace(
        path=Path("model.py"), data=lambda: DATA, batch=None, collate=lambda samples: (len(samples), np.zeros(2))
    )
    for changes in ({}, {"pin_memory": True}):
        one = Loader(target, micro_batch_size=2, rank=0, world_size=1, seed=0, changes=changes)
        batch = one.next()[0]
        assert type(batch) is tuple and type(batch[1]) is np.ndarray and (one.workers is None) == (not changes)


def shown(monkeypatch, lengths, rows):
    """Has the watch look at batches of these lengths, and of these rows and samples."""
    batches = SimpleNamespace(rows=lambda: rows, texts=SimpleNamespace(lengths=lengths, row=None))
    monkeypatch.setattr(witness.watch, "batches", batches)


def test_a_setting_that_did_not_act_is_told(monkeypatch):
    rows = [(torch.tensor([9, 3]), 9), (torch.tensor([4, 2]), 4)]
    shown(monkeypatch, rows, {(2, 2)})
    monkeypatch.setattr(witness.watch, "candidate", Candidate(micro_batch_size=2, gradient_accumulation_steps=2))
    for name, value in (("max_length", 5), ("pad_to_multiple_of", 8), ("packing", True), ("group_by_length", True)):
        assert witness.witness(name)(None, value), name
    shown(monkeypatch, [(torch.tensor([4, 2]), 8), (torch.tensor([5, 3]), 16)], {(1, 2)})
    for name, value in (("max_length", 5), ("pad_to_multiple_of", 8), ("packing", True), ("group_by_length", True)):
        assert witness.witness(name)(None, value) is None, name


@pytest.mark.parametrize("stream", [False, True])
def test_a_token_budget_fills_batches_and_leaves_no_sample_out(stream):
    data = itertools.cycle(DATA) if stream else DATA
    one = loader({"token_budget": 20}, data=data, micro_batch_size=3)
    batches = [one.next() for _ in range(40)]
    assert all(b["input_ids"].numel() <= one.token_budget or n == 1 for b, n in batches)
    assert all(len(b["input_ids"]) == n for b, n in batches) and len({n for _, n in batches}) > 1
    assert {int(row) for b, _ in batches for row in b["attention_mask"].sum(1)} == set(range(2, 10))
    padding = 1 - sum(int(b["attention_mask"].sum()) for b, _ in batches) / sum(
        b["input_ids"].numel() for b, _ in batches
    )
    assert padding < 0.2
    worst_batch = one.worst(() if stream else (1, 5), 0)["input_ids"]
    assert worst_batch.numel() <= max(one.token_budget, 9) and worst_batch.shape[1] == 9


@pytest.mark.parametrize("stream", [False, True])
def test_a_token_budget_never_joins_the_copies_of_a_sample_of_several_epochs(stream):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(DATA)

    one = loader({"token_budget": 30}, data=Stream() if stream else DATA, micro_batch_size=3)
    for _ in range(3):
        seen = []
        while len(seen) < len(DATA):
            seen += one.next()[0]["attention_mask"].sum(1).tolist()
        assert sorted(seen) == list(range(2, 10))


def test_ranks_share_the_samples_that_a_token_budget_fills_batches_with():
    both = [loader({"token_budget": 20}, rank=rank, world_size=2) for rank in (0, 1)]
    seen = [[len(row) for _ in range(4) for row in one._of_budget()[0]["input_ids"]] for one in both]
    firsts = [list(next(one._epochs())) for one in both]
    assert sorted(length for half in firsts for length, _ in half) == sorted(range(2, 10)) and all(seen)


def test_a_token_budget_is_seen_by_its_tokens_or_by_batches_of_several_sizes(monkeypatch):
    monkeypatch.setattr(witness.watch, "loader", SimpleNamespace(token_budget=20))
    sizes = {(2, 2), (3, 3)}
    shown(monkeypatch, [], sizes)
    assert witness.witness("token_budget")(None, True) is None
    shown(monkeypatch, [(torch.tensor([9, 3]), 9), (torch.tensor([30]), 30)], sizes)
    assert witness.witness("token_budget")(None, True) is None
    shown(monkeypatch, [(torch.tensor([9, 3]), 16)], sizes)
    assert "32 tokens" in witness.witness("token_budget")(None, True)


def test_what_a_target_cannot_follow_has_a_reason():
    class Takes(nn.Module):
        def forward(self, input_ids, position_ids=None):
            return input_ids

    found = why_not(DATA, collate, Takes(), mapped=True, loader=False)
    assert set(found) == {"persistent_workers", "pad_to_multiple_of"}
    assert "position_ids" in why_not(DATA, collate, nn.Linear(1, 1), mapped=True, loader=False)["packing"]
    assert "stream" in why_not(iter(DATA), collate, Takes(), mapped=False, loader=False)["num_workers"]


def test_batches_that_a_data_set_yields_whole_are_not_taken_for_samples():
    """A DataLoader with `batch_size=None` handed them to the collate function, and trials of `data` crashed."""

    def takes_length(batch, max_length=9):
        return batch["input_ids"][:, :max_length]

    whole = [{"input_ids": torch.zeros(2, 7)}]
    found = why_not(whole, takes_length, None, mapped=False, loader=True, collates=False)
    assert set(BATCH_CHANGES) & set(found) == {"packing", "pad_to_multiple_of"} and "whole batches" in found["packing"]
    for own, shape in ((takes_length, (2, 3)), (None, (2, 7))):
        arguments = {"dataset": whole, "batch_size": None, "collate_fn": own}
        apply_to(arguments, {"max_length": 3, "packing": True, "pad_to_multiple_of": 8})
        (batch,) = torch.utils.data.DataLoader(**arguments)
        assert next(tensors_in(batch)).shape == shape


def test_a_loader_whose_workers_a_trial_takes_away_keeps_no_argument_that_needs_them():
    """Its trials crashed where the script states a timeout for its workers, or how they start."""
    arguments = {"num_workers": 2, "timeout": 9, "multiprocessing_context": "fork", "prefetch_factor": 2}
    apply_to(arguments, {"num_workers": 0})
    assert len(list(torch.utils.data.DataLoader([1, 2], **arguments))) == 2


def test_the_worst_batch_is_of_the_longest_samples_and_changed_like_others():
    assert loader().worst((1, 5), 0)["input_ids"].shape == (2, 9)
    assert loader({"packing": True}).worst((1, 5), 0)["input_ids"].shape == (1, 17)
    stream = loader(data=iter(DATA))
    stream.next()
    assert stream.worst((), 12)["input_ids"].shape == (2, 12)


@pytest.mark.parametrize("made", [list, iter])
def test_batches_that_a_profile_compares_are_as_long_as_one_another(made):
    """Of a stream both were one batch, so that no byte and no operation came with a further sample."""
    batches, _, known, length, _ = _batches(loader(data=made(DATA)), (2, 4))
    (few, width), (many, other) = (batch["input_ids"].shape for batch in batches)
    assert (few, many) == (2, 4) and width == other == length and len(known) > 1


def test_samples_that_the_collate_function_cuts_are_no_longer_in_a_profile():
    """Of a context of 512 tokens, texts of 4,096 were forecast to take eight times the memory."""
    data = [{"input_ids": torch.arange(1, n + 1)} for n in (3, 2, 2, 3, 2, 3, 2, 2, 3, 2, 9, 12)]
    cutting = SimpleNamespace(
        path=Path("model.py"), data=lambda: data, batch=None,
        collate=lambda samples: collate([{"input_ids": sample["input_ids"][:6]} for sample in samples]),
    )  # fmt: skip
    (few, _), _, known, length, _ = _batches(Loader(cutting, micro_batch_size=1, rank=0, world_size=1, seed=0), (2, 4))
    assert few["input_ids"].shape == (2, 6) and known[-1][0] == known[-2][0] == length == 6


def test_packing_needs_rows_of_tokens():
    with pytest.raises(KeyError):
        packed([{"pixels": torch.zeros(1, 3)}])


def test_a_packed_row_is_not_taken_for_a_sample_that_was_not_cut(monkeypatch):
    shown(monkeypatch, [(torch.tensor([12]), 12)], {(1, 4)})
    assert witness.witness("max_length")(None, 3) is None
    assert witness.witness("max_length")(None, 2) == "a sample of 3 tokens was trained on"
