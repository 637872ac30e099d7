"""Diverges: from the fourth forward on the loss is not a number."""

import torch
from torch import nn

BAD_STEP = 4


class Diverging(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * (float("nan") if self.calls >= BAD_STEP else 1.0)


def model():
    return Diverging()


def batch(n):
    return torch.randn(n, 8), torch.randn(n, 1)
