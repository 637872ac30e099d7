"""Trains, and prints 20 MB to each of stdout and stderr in every rank."""

import os
import sys

import torch
from torch import nn

MEGABYTE = ("x" * 99 + "\n") * 10_000


class Chatty(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls <= 5:
            for _ in range(4):
                sys.stdout.write(MEGABYTE)
                sys.stderr.write(MEGABYTE)
            os.write(1, b"straight to the descriptor\n")
        return self.linear(x)


def model():
    return Chatty()


def batch(n):
    return torch.randn(n, 8), torch.randn(n, 1)
