"""Trains with step times that scatter: each forward sleeps 5 ms, and one in five about 20 ms more."""

import random
import time

import torch
from torch import nn


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.random = random.Random(0)

    def forward(self, x):
        time.sleep(0.005 + (self.random.uniform(0.01, 0.03) if self.random.random() < 0.2 else 0.0))
        return self.linear(x)


def model():
    return Noisy()


def batch(n):
    return torch.randn(n, 8), torch.randn(n, 1)
