"""What is counted of an operation is the same on fake tensors and on real ones, and no more than it moves."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.worker.profile.op_counter import OpCounter, follow


class Words(nn.Module):
    """A table of words, a layer over a batch of sequences, and logits."""

    def __init__(self):
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(64, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 64)

    def forward(self, words):
        return self.head(torch.relu(self.layer(self.table(words))))


def loss(model, words):
    return nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())


def test_fake_tensors_take_as_many_operations_and_bytes_as_real_ones():
    real = follow(Words(), loss, torch.zeros(2, 5, dtype=torch.long))
    with FakeTensorMode():
        fake = follow(Words(), loss, torch.zeros(2, 5, dtype=torch.long))
    assert (fake.n_ops, fake.moved_bytes, fake.flops) == (real.n_ops, real.moved_bytes, real.flops)
    assert real.n_ops < 60


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_a_model_with_a_sparse_buffer_is_followed(kind):
    """As the neighbours of a graph, which have no storage of their own."""
    model = nn.Linear(4, 1)
    model.register_buffer("neighbours", kind(torch.eye(4)))
    trace = follow(model, lambda model, x: model(model.neighbours @ x).sum(), torch.ones(4, 4))
    assert trace.n_ops and OpCounter([]).live([model.neighbours]) == 0


@pytest.mark.parametrize(
    ("run", "moved"),
    [
        (lambda known, x, rows: x + x, 3 * 4 * 16),
        (lambda known, x, rows: x.view(2, 8).t(), 0),
        (lambda known, x, rows: torch.ops.aten._unsafe_view(x, [2, 8]), 0),
        # Of a table the rows that are read, which are as long as what is written, and their numbers of 8 bytes.
        (lambda known, x, rows: nn.functional.embedding(rows, known), 2 * 4 * 4 + 2 * 8),
        # Weights are counted once a pass elsewhere: here the batch and the result.
        (lambda known, x, rows: (x.view(4, 4) @ known).detach(), 2 * 4 * 16),
        (lambda known, x, rows: x.view(4, 4) @ x.view(4, 4), 3 * 4 * 16),
    ],
)
def test_bytes_that_an_operation_moves(run, moved):
    known, x, rows = nn.Parameter(torch.ones(4, 4)), torch.ones(16), torch.tensor([1, 2])
    with OpCounter([known, x]) as counter:
        run(known, x, rows)
    assert counter.trace.moved_bytes == moved
