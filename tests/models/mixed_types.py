"""Multiplies 16-bit activations by a table in fp32, which torch refuses, and torch.autocast does not."""

import torch
from torch import nn


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return (self.linear(x) @ torch.eye(8, device=x.device)).square().mean()


def model():
    return Mixed()


def batch(n):
    return torch.randn(n, 8)
