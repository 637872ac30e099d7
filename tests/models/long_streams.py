"""Reads and writes large activations again and again, with hardly any arithmetic for each number."""

import torch
from torch import nn

WIDTH, TIMES = 512, 12
ROWS = torch.randn(8, 256, WIDTH)  # drawn once: drawing takes a fifth of a step


class Streams(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((TIMES,), 0.9))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for scale in self.scale:
            x = x * scale + 0.1
        return self.head(x)


def model():
    return Streams()


def loss(model, batch):
    return model(batch).square().mean()


def batch(n):
    return ROWS[torch.arange(n) % len(ROWS)]


def optimizer(params):
    return torch.optim.SGD(params, lr=1e-3, foreach=True)
