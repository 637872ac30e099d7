"""A GPT of any size on made-up tokens: what `gpu.py` measures; it rewrites the line of sizes."""

import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.utils.data import Dataset

LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY, ON_DEVICE = 12, 768, 12, 1024, 50304, False
TOKENS = 1 << 22


class Block(nn.Module):
    """Attention, then a feed-forward net, each on a normalised copy of the stream."""

    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tokens in, logits of the next token out."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens):
        x = self.token(tokens) + self.position[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Tokens(Dataset):
    """Pieces of one sequence in which a token mostly follows from the one before it, so that there is something to learn."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        steps = torch.randint(1, 4, (TOKENS,), generator=generator)
        self.tokens = steps.cumsum(0) % VOCABULARY

    def __len__(self):
        return (TOKENS - 1) // CONTEXT

    def __getitem__(self, index):
        piece = self.tokens[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return piece[:-1], piece[1:]


def model():
    """On one thread of the host a billion weights take half a minute to draw."""
    place = get_accelerator().current_device_name() if ON_DEVICE else "cpu"
    with torch.device(place):
        return GPT()


def data():
    return Tokens()
