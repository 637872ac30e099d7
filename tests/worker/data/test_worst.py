"""The worst batch: of the longest samples, or the largest that was seen, stretched."""

from collections import UserDict
from types import SimpleNamespace

import torch

from autotune.worker.containers import tensors_in
from autotune.worker.data import worst


def test_the_longest_samples_make_the_worst_batch_and_come_again_where_fewer_are_known():
    data = [{"input_ids": torch.arange(n)} for n in (2, 9, 5)]
    found = worst.batch_of(data, list, (1, 2), 3, 0)
    assert [len(each["input_ids"]) for each in found] == [9, 5, 9]


def test_samples_are_stretched_to_the_stated_length_and_cut_to_a_limit():
    sample = {"ids": [1, 2, 3], "mask": torch.ones(3), "label": 7}
    longer = worst.stretched_sample(sample, 5)
    assert longer["ids"] == [1, 2, 3, 1, 2] and longer["mask"].shape == (5,) and longer["label"] == 7
    assert worst.cut_sample(sample, 2)["ids"] == [1, 2] and worst.cut_sample(sample, 4) is sample


def test_what_a_model_does_not_take_is_left_as_it_is():
    sample = {"text": "a longer text than its tokens", "input_ids": [1, 2, 3]}
    assert worst.cut_sample(sample, 2) == {"text": sample["text"], "input_ids": [1, 2]}


def test_a_sample_in_a_class_that_maps_keeps_it():
    """The collate function of a model.py found a dict in place of a sample whose fields are attributes."""
    sample = UserDict(input_ids=torch.arange(3))
    for changed, n in ((worst.stretched_sample(sample, 5), 5), (worst.cut_sample(sample, 2), 2)):
        assert type(changed) is UserDict and changed["input_ids"].shape == (n,) and sample["input_ids"].shape == (3,)


def test_the_channels_of_pictures_are_not_stretched():
    """The model's first convolution refused such a batch, and the check of the longest samples ended the trial."""
    for batch in (
        (torch.zeros(4, 3, 8, 8), torch.zeros(4, 5)),
        {"pixel_values": torch.zeros(4, 3, 8, 8), "boxes": torch.zeros(4, 9)},
    ):
        assert [t.shape for t in tensors_in(worst.stretched(batch, 4, 16))] == [t.shape for t in tensors_in(batch)]
    named = {"features": torch.zeros(4, 3, 8), "input_ids": torch.zeros(4, 3), "weights": torch.zeros(4, 5)}
    assert worst.stretched(named, 4, 16)["features"].shape == (4, 16, 8)


def test_every_row_of_a_streams_worst_batch_is_its_longest_one():
    ids = torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7]])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long(), "weight": torch.tensor([0.5, 2.0])}
    found = worst.stretched(batch, 2, 6)
    assert found["input_ids"].tolist() == [[4, 5, 6, 7, 4, 5]] * 2
    assert found["attention_mask"].sum() == 12 and found["weight"].tolist() == [2.0, 2.0]


def test_the_worst_batch_is_made_whatever_default_device_a_script_has_set():
    ids = torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7]])
    plain, padded, sample = (ids,), {"input_ids": ids, "attention_mask": (ids > 0).long()}, {"input_ids": ids[0]}
    with torch.device("meta"):  # a script's is that of its GPU, and its samples are in host memory
        assert worst.stretched(plain, 2, 6)[0].tolist() == [[1, 2, 3, 0, 1, 2]] * 2
        assert worst.stretched(padded, 2, 6)["input_ids"].tolist() == [[4, 5, 6, 7, 4, 5]] * 2
        assert worst.stretched_sample(sample, 6)["input_ids"].tolist() == [1, 2, 3, 0, 1, 2]
        assert worst.cut_sample(sample, 2)["input_ids"].tolist() == [1, 2]


def test_a_batch_of_wide_features_is_stretched_along_its_sequences():
    """`--max-length` was said to fit though nothing was stretched: the features were taken for the length."""
    batch, turned = torch.arange(30.0).view(2, 3, 5), torch.arange(30.0).view(2, 5, 3)
    for fixed in ({5}, {5, 9}):
        assert worst.stretched(batch, 2, 7, fixed).shape == (2, 7, 5)
        assert worst.stretched(turned, 2, 7, fixed).shape == (2, 5, 7)
        assert worst.length_in((2, 3, 5), 2, fixed) == 3
    features = [(torch.zeros(at, 5), torch.zeros(at)) for at in (2, 3)]
    assert [t.shape for t in worst.batch_of(features, list, (1, 0), 2, 7, {5})[0]] == [(7, 5), (7,)]
    pictures = torch.zeros(2, 3, 4, 6)
    assert worst.stretched(pictures, 2, 9).shape == pictures.shape


def test_a_sequence_first_batch_is_stretched_along_its_sequences():
    ids, lengths = worst.stretched((torch.arange(15).view(5, 3), torch.tensor([5, 4, 2])), 3, 8)
    assert ids.shape == (8, 3) and lengths.tolist() == [5, 5, 5]


def test_a_batch_in_a_class_of_its_own_is_as_large_as_what_it_holds():
    graphs = SimpleNamespace(x=torch.zeros(5, 3), edges=torch.zeros(2, 9), batch=torch.zeros(5), parent=object())
    assert worst.size_of(graphs) == 15 + 18 and worst.rows_of([graphs]) == 5


def test_the_length_of_a_batch_is_that_of_its_samples_in_rows_packed_or_sequence_first():
    shapes = (4, 100), (1, 400), (100, 4), (4,), (4, 3, 90, 100)
    assert [worst.length_in(shape, 4) for shape in shapes] == [100, 100, 100, 0, 100]


def test_the_largest_batch_of_a_sampler_that_fills_a_token_budget_is_one_that_it_makes():
    data = [{"input_ids": torch.arange(n)} for n in (2, 3, 2, 3, 9, 2)]
    made = [[0, 2, 5], [1, 3, 0], [4]]
    iterator = iter(torch.utils.data.DataLoader(data, batch_sampler=made, collate_fn=list))
    found = worst.heaviest(iterator, largest=[{"input_ids": torch.arange(2)}])
    assert [len(each["input_ids"]) for each in found] == [3, 3, 2]  # not three of nine
