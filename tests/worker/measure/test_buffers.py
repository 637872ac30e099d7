"""Buffers that a model changes as it goes forward."""

import copy
from pathlib import Path
from types import SimpleNamespace

import torch
from support.instant import WORKLOAD
from torch import nn

from autotune.worker.measure.buffers import BufferWatch
from autotune.worker.profile.model import _assemble, _Batches, _Subject
from autotune.worker.script.probe import _with_updates


class Ranged(nn.Module):
    """Notes the range of what goes through it, as fake quantization does; of equal samples it stays."""

    def __init__(self):
        super().__init__()
        self.register_buffer("most", torch.zeros(()))

    def forward(self, x):
        self.most.copy_(torch.maximum(self.most, x.detach().abs().max()))
        return x


class Codebook(nn.Module):
    """Moves its codes with each micro-batch, as a VQ-VAE does, without a trace in their version."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.ones(2, dtype=torch.bfloat16))

    def forward(self, x):
        self.codes.data.mul_(0.5).add_(x.detach().mean(0))
        return x


class Averaged(nn.Module):
    """Keeps a running mean by assigning it anew."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x


class Masked(nn.Module):
    """Makes a mask in its first forward, and makes a table longer in each."""

    def forward(self, x):
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.full((2,), -torch.inf))
            self.register_buffer("table", torch.ones(0))
            self.register_buffer("graph", torch.eye(2).to_sparse())
        self.table = torch.ones(len(self.table) + 1)
        return x


def test_buffers_that_a_forward_changes_are_told_from_those_that_it_makes_once():
    """Recomputation changes them twice, and a codebook goes by the micro-batch: both passed for drop-in."""
    blocks = [nn.Sequential(nn.Linear(2, 2), kind(), nn.BatchNorm1d(2)) for kind in (Ranged, Masked)]
    model, x = nn.Sequential(*blocks, Codebook()), torch.ones(3, 2)
    watch = BufferWatch(model)
    for _ in range(2):
        model(x)
        copy.deepcopy(model)(2 * x)  # as an average of the weights, which is not watched
    assert watch.changed == {blocks[0][1], model[2]}
    found = _with_updates(WORKLOAD, watch, blocks)
    assert (found.updates, found.by_micro_batch) == ("Ranged", "Codebook")
    assert [text.partition(" ")[0] for text in found.caveats[len(WORKLOAD.caveats) :]] == ["Ranged", "Codebook"]
    assert _with_updates(WORKLOAD, BufferWatch(nn.Linear(2, 2)), []) == WORKLOAD


def test_the_profile_of_a_model_file_sees_them_too_without_its_values():
    """A VQ-VAE's codebook in a model.py passed for drop-in at another micro-batch."""

    def model():
        blocks = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), kind()) for kind in (Ranged, Averaged)]
        return nn.Sequential(*blocks, Codebook(), Masked())

    target = SimpleNamespace(
        path=Path("model.py"), model=model, blocks=None, loss=lambda model, x: model(x).square().mean()
    )
    batches = _Batches([torch.ones(n, 2) for n in (2, 4)], (2, 4), (), 1, False)
    found = _Subject(target, batches, torch.device("cpu"), fake=True)
    found.caveats.append("known")
    profile = _assemble(found, {"fp32/0": found.first[1]}, optimizer_bytes=8.0)
    assert (profile.updates, profile.by_micro_batch) == ("Averaged, Ranged", "Averaged, Codebook, Ranged")
    assert [text.partition(" ")[0] for text in profile.caveats] == ["known", "Averaged,", "Averaged,"]


def test_what_an_evaluation_changes_is_no_matter_of_the_training():
    model = nn.Sequential(Codebook())
    watch = BufferWatch(model)
    model(torch.ones(3, 2))
    with torch.no_grad():
        model(torch.zeros(3, 2))
    model.eval()(torch.zeros(3, 2))
    assert not watch.changed
    model.train()(torch.zeros(3, 2))
    assert watch.of_floats == {model[0]}
