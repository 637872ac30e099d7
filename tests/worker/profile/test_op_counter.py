"""What is counted of an operation is the same on fake tensors and on real ones, and no more than it moves."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention
from torch.utils.flop_counter import flop_registry

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


def flops(run):
    """Returns the FLOPs of forward and backward."""
    with OpCounter([]) as counter:
        run().sum().backward()
    return counter.trace.flops


def test_products_of_each_expert_with_its_own_tokens_count():
    """As in all mixtures of transformers 5; both factors have a gradient."""
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("a torch without them")
    tokens, experts = (
        torch.randn(64, 32).bfloat16().requires_grad_(),
        torch.randn(4, 32, 16).bfloat16().requires_grad_(),
    )
    ends = torch.tensor([16, 16, 48, 64], dtype=torch.int32)
    assert flops(lambda: torch._grouped_mm(tokens, experts, offs=ends) * 1.0) == 3 * 2 * 64 * 32 * 16


@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"bidirectional": True}])
def test_recurrent_layers_count(options):
    model = nn.LSTM(8, 16, **options)
    weights = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)
    assert flops(lambda: model(torch.ones(5, 3, 8))[0]) == 3 * 2 * 15 * weights


def test_attention_counts_also_where_several_query_heads_share_one_of_keys():
    query, key = torch.ones(2, 8, 64, 16, requires_grad=True), torch.ones(2, 2, 64, 16, requires_grad=True)
    count = flops(lambda: nn.functional.scaled_dot_product_attention(query, key, key, enable_gqa=True))
    assert count == 2 * 2 * 8 * 64 * 64 * (2 + 5) * 16


@pytest.mark.parametrize(
    ("signature", "given", "pairs"),
    [
        ("_flash_attn_forward({q}) -> Tensor", "q", 2 * 64 * 48 * 2),
        ("_flash_attn_backward(Tensor dout, {q}, Tensor out) -> Tensor", "dqd", 2 * 64 * 48 * 5),
        ("_flash_attn_varlen_forward({q}, {ends}) -> Tensor", "re", (8 * 4 + 56 * 44) * 2),
        ("_flash_attn_varlen_backward(Tensor dout, {q}, {rest}, {ends}) -> Tensor", "drddddde", (8 * 4 + 56 * 44) * 5),
    ],
)
def test_the_operations_of_flash_attention_2_count(signature, given, pairs):
    """Models with attn_implementation="flash_attention_2" read as if attention cost nothing."""
    tensors = {
        "d": [torch.ones(1)], "q": [torch.ones(2, 64, 8, 16), torch.ones(2, 48, 2, 16), torch.ones(2, 48, 2, 16)],
        "r": [torch.ones(64, 8, 16), torch.ones(48, 2, 16), torch.ones(48, 2, 16)],
        "e": [torch.tensor([0, 8, 64], dtype=torch.int32), torch.tensor([0, 4, 48], dtype=torch.int32)],
    }  # fmt: skip
    parts = {"q": "Tensor q, Tensor k, Tensor v", "ends": "Tensor cu_seqlens_q, Tensor cu_seqlens_k"}
    parts["rest"] = "Tensor out, Tensor softmax_lse, Tensor dq, Tensor dk, Tensor dv"
    name = signature.partition("(")[0]
    with torch.library._scoped_library("flash_attn", "FRAGMENT") as library, OpCounter([]) as counter:
        library.define(signature.format(**parts))
        library.impl(name, lambda first, *_: first.clone(), "CompositeExplicitAutograd")
        getattr(torch.ops.flash_attn, name)(*(tensor for letter in given for tensor in tensors[letter]))
    assert counter.trace.flops == 2 * pairs * 8 * 16


def test_flexible_attention_runs_while_operations_are_counted():
    """It is an operation of higher order, which torch refuses in a mode that does not say that it takes them."""
    query = torch.ones(1, 2, 128, 16)
    blocks = flex_attention._create_empty_block_mask(query, query).as_tuple()
    with OpCounter([]) as counter:
        torch.ops.higher_order.flex_attention(query, query, query, lambda score, *_: score, blocks, 0.25, {})
    assert counter.trace.flops == 2 * 2 * 128 * 128 * 2 * 16


def test_shapes_that_torchs_table_does_not_know_fail_no_model(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("shapes are incompatible")

    monkeypatch.setitem(flop_registry, torch.ops.aten.mm, refuse)
    assert follow(nn.Linear(4, 4, bias=False), lambda model, x: model(x).sum(), torch.ones(2, 4)).n_ops
