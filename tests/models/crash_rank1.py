"""Crashes: rank 1 raises in its third forward; what the other ranks then say is an echo."""

import os

import torch
from torch import nn

BAD_RANK, BAD_STEP = 1, 3


class Crashing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == BAD_STEP and int(os.environ["RANK"]) == BAD_RANK:
            raise ValueError("rank 1 dislikes this batch")
        return self.linear(x)


def model():
    return Crashing()


def batch(n):
    return torch.randn(n, 8), torch.randn(n, 1)
