"""What is said of loaders whose batches follow a trial."""

from types import SimpleNamespace

import pytest
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from autotune.worker.script import loaders


class Bucketed(BatchSampler):
    """Puts samples of like lengths together."""


@pytest.mark.parametrize(("kind", "others"), [(BatchSampler, False), (Bucketed, True)])
def test_a_sampler_of_the_scripts_own_may_put_other_samples_together(kind, others, monkeypatch):
    """Nothing was said of it, though its buckets are made of as many samples as a batch has."""
    said: list[str] = []
    context = SimpleNamespace(
        drawn=lambda: (4, 2), changed=said.append, candidate=None, data_by_framework={}, request=None
    )
    hooks = loaders.Loaders(context)
    monkeypatch.setattr(loaders, "place_of", lambda _: "train.py:1")
    loader, data = DataLoader.__new__(DataLoader), list(range(8))
    sampler = kind(SequentialSampler(data), 4, drop_last=True)
    hooks._init(DataLoader.__init__, loader, data, batch_sampler=sampler)
    hooks._tell_changes([id(data)])
    assert sampler.batch_size == 2 and ("other samples together" in said[0]) is others
