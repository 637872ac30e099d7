"""A small language model with expert layers of deepspeed.moe, all experts of a layer in every rank."""

import torch
from deepspeed.moe.layer import MoE
from torch import nn

VOCAB, WIDTH = 64, 32


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(WIDTH, Expert(), num_experts=4, k=1, capacity_factor=2.0, use_rts=False)

    def forward(self, x):
        x = x + self.mix(self.norm(x))
        mixed, balance, _ = self.moe(x)
        return x + mixed, balance


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        # Each expert starts with numbers of its own, as in models that initialise all their layers.
        self.apply(self._start)

    def _start(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.05)

    def forward(self, x, y):
        hidden, total = self.embedding(x), 0.0
        for block in self.blocks:
            hidden, balance = block(hidden)
            total = total + balance
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten()) + 0.01 * total


def model():
    return Net()


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 2048

    def __getitem__(self, index):
        tokens = torch.randint(VOCAB, (17,), generator=torch.Generator().manual_seed(index))
        return tokens[:-1], tokens[1:]


def data():
    return Tokens()
