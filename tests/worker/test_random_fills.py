"""Random weights that are drawn once: what is repeated is what would have been drawn."""

from types import SimpleNamespace

import pytest
import torch

from autotune.worker import random_fills


@pytest.fixture
def build(monkeypatch):
    """Builds weights with hooks on tensors as a new rank would, from a seed; returns them and the large fills drawn."""
    monkeypatch.setattr(random_fills, "_store", None)
    random_fills.open_store()
    store = random_fills._store

    def run(seed=0, *, hooked=True, phase="build", rank="0", shape=(1024, 600)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setattr(random_fills, "_store", random_fills._Store(store.values, store.index, store.most_bytes))
        drawn = []
        with pytest.MonkeyPatch.context() as patched:
            for name in random_fills.FILLS:
                original = getattr(torch.Tensor, name)

                def counted(tensor, *args, original=original, **kwargs):
                    drawn.append(tensor.numel())
                    return original(tensor, *args, **kwargs)

                patched.setattr(torch.Tensor, name, counted)
            if hooked:
                random_fills.install(SimpleNamespace(report=SimpleNamespace(phase=phase)))
            torch.manual_seed(seed)
            weights = [torch.nn.init.normal_(torch.empty(shape), 0.0, 0.02), torch.nn.init.normal_(torch.empty(10))]
            weights += [torch.nn.init.kaiming_uniform_(torch.empty(shape, dtype=torch.bfloat16)), torch.randn(5)]
            return weights, [n for n in drawn if n > 10]

    return run


def equal(some, others):
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def test_a_later_rank_finds_the_very_weights_and_the_state_that_follows_them(build):
    plain, _ = build(hooked=False)
    first, drawn = build(shape=(700, 1024)), build(rank="1")[1]
    assert len(first[1]) == 2 and len(drawn) == 2  # another shape is another fill, and rank 1 keeps nothing
    assert equal(build()[0], plain)
    again, drawn = build(rank="1")
    assert drawn == [] and equal(again, plain)


def test_another_seed_or_a_later_phase_draws_anew(build):
    build()
    assert build(seed=1)[1] != [] and equal(build(seed=1)[0], build(seed=1, hooked=False)[0])
    assert build(phase="measure")[1] != []


def test_a_full_disk_costs_only_time(build, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(random_fills.os, "pwrite", full)
    assert equal(build()[0], build(hooked=False)[0])
