"""A small GPT that learns to write Python, byte by byte, from the standard library's own sources."""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

LAYERS, WIDTH, HEADS, CONTEXT, BYTES = 4, 256, 4, 64, 256


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
    """Bytes in, logits of the next byte out."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(BYTES, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, BYTES, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens):
        x = self.token(tokens) + self.position[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Source(Dataset):
    """The text in pieces of CONTEXT bytes; the target of each byte is the byte after it."""

    def __init__(self):
        # Only the files that every installation of one Python version has, in one order: every rank and machine reads the same.
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(
            file.read_bytes() for file in files if not file.name.startswith(("_sysconfigdata", "site", "usercustomize"))
        )
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self):
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index):
        piece = self.text[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return piece[:-1], piece[1:]


def model():
    return GPT()


def data():
    return Source()


def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
