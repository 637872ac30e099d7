"""Activation checkpointing of blocks."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autotune.worker.measure import recompute
from autotune.worker.measure.recompute import Checkpointer, Recomputations


@pytest.fixture
def blocks():
    """A net of four blocks with dropout."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()) for _ in range(4)))


@pytest.mark.parametrize(("every", "n"), [(1, 4), (2, 2), (3, 2), (4, 1), (5, 1)])
def test_every_kth_block_is_recomputed_and_none_without_gradients(blocks, every, n):
    checkpointer = Checkpointer(list(blocks), every)
    with torch.no_grad():
        blocks(torch.randn(2, 8))
    assert not checkpointer.recomputed
    blocks(torch.randn(2, 8)).sum().backward()
    assert len(checkpointer.recomputed) == n


@pytest.mark.parametrize("inside", [False, True])
def test_recomputation_by_others_is_noted_until_the_watch_stops(blocks, inside):
    """A pipeline's engine calls whole blocks again: there a block that checkpoints its own forward does not count."""
    watch, pipeline = Recomputations(list(blocks)), Recomputations(list(blocks), every=7)
    x = torch.ones(2, 8)
    for n, block in enumerate(blocks):
        again = block.forward if inside else block
        x = checkpoint(again, x, use_reentrant=False) if n % 2 == 0 else block(x)
    x.sum().backward()
    assert len(watch.recomputed) == 2 and watch.every == 2
    assert len(pipeline.recomputed) == (0 if inside else 2) and pipeline.every == 7
    watch.stop()
    watch.recomputed.clear()
    checkpoint(blocks, torch.ones(2, 8), use_reentrant=False).sum().backward()
    assert not watch.recomputed and watch.every == 0


def test_recomputation_is_timed_whether_we_asked_for_it_or_a_script(blocks, monkeypatch):
    """Of scripts it was part of backward, and its share in the bottleneck an estimate; with `--profile` it still was."""
    timed = []
    monkeypatch.setattr(recompute, "timer", lambda run: timed.append(True) or run())
    ours, its, plain, _ = blocks
    Checkpointer([ours], 1)
    watch = Recomputations([its])
    for n_timed in (2, 4):  # in the steps that are taken apart before and after the timed ones
        plain(checkpoint(watch.noting(its), ours(torch.ones(2, 8)), use_reentrant=False)).sum().backward()
        assert len(timed) == n_timed
        watch.stop()


class Listed(nn.Module):
    """A block whose parts are in a list, as those of T5."""

    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList([nn.Linear(8, 8), nn.Tanh()])

    def forward(self, x):
        for part in self.layer:
            x = part(x)
        return x


def test_blocks_whose_parts_are_in_a_list_are_seen_to_be_recomputed():
    """Every third of seven blocks was told as every second."""
    blocks = [Listed() for _ in range(7)]
    watch, x = Recomputations(blocks), torch.ones(2, 8)
    for n, block in enumerate(blocks):
        x = checkpoint(block.forward, x, use_reentrant=False) if n % 3 == 0 else block(x)
    x.sum().backward()
    assert watch.every == 3


def test_recomputing_changes_no_gradient_and_no_name(blocks):
    x, names = torch.randn(2, 8), list(blocks.state_dict())

    def gradients():
        torch.manual_seed(0)
        blocks.zero_grad()
        blocks(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in blocks.parameters()]

    plain = gradients()
    Checkpointer(list(blocks), 1)
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))
    assert list(blocks.state_dict()) == names


def test_a_deep_copy_computes_with_its_own_weights_and_copies_no_watch(blocks):
    """An average of the weights, as a script makes it after `deepspeed.initialize`."""
    watch = Recomputations(list(blocks))
    watch.lock = threading.Lock()  # stands for the report that instruments hold; it cannot be copied
    Checkpointer(list(blocks), 1)
    average = copy.deepcopy(blocks.eval())
    for parameter in average.parameters():
        parameter.data.zero_()
    assert not average(torch.randn(2, 8)).any()
    assert blocks(torch.randn(2, 8)).any()


def test_fewer_bytes_are_saved_for_backward_when_recomputed(blocks):
    def saved():
        kept = {}

        def pack(tensor):
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            blocks(torch.randn(64, 8, requires_grad=True)).sum().backward()
        return sum(kept.values())

    plain = saved()
    Checkpointer(list(blocks), 1)
    assert saved() < plain


class Chain(nn.Module):
    """Blocks of which a function runs each."""

    def __init__(self, run):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.run = run

    def forward(self, x):
        for block in self.blocks:
            x = self.run(block, x)
        return x.sum()


@pytest.fixture
def graphs():
    """Graphs that torch's compiler made, and a backend that notes them."""
    made = []

    def noted(graph, _inputs):
        made.append(graph)
        return graph.forward

    torch._dynamo.reset()
    yield made, noted
    torch._dynamo.reset()


def recomputed(block, x):
    return checkpoint(block, x, use_reentrant=False)


@pytest.mark.parametrize(("run", "n"), [(lambda block, x: block(x), 0), (recomputed, 4)])
def test_a_compiled_model_stays_one_graph_in_which_recomputation_is_seen(graphs, run, n):
    """A graph that is cut at each block, or none, would be timed in place of what is trained."""
    (made, backend), net = graphs, Chain(run)
    watch = Recomputations(list(net.blocks))
    compiled = torch.compile(net, backend=backend)
    for _ in range(2):
        compiled(torch.randn(2, 8)).backward()
    assert len(made) == 1 and len(watch.recomputed) == n and watch.every == bool(n)
    watch.stop()


def test_blocks_that_are_compiled_one_by_one_and_recomputed_as_wholes_are_seen(graphs):
    made, backend = graphs
    net = Chain(lambda block, x: recomputed(watch.noting(block), x))
    watch = Recomputations(list(net.blocks))
    for block in net.blocks:
        block.compile(backend=backend)
    for _ in range(2):
        net(torch.randn(2, 8)).backward()
    assert len(made) <= 4 and len(watch.recomputed) == 4
    watch.stop()


def test_our_own_recomputation_is_part_of_a_compiled_graph(graphs):
    (made, backend), net = graphs, Chain(lambda block, x: block(x))
    checkpointer = Checkpointer(list(net.blocks), 2)
    torch.compile(net, backend=backend)(torch.randn(2, 8)).backward()
    assert len(made) == 1 and len(checkpointer.recomputed) == 2
