"""Does not do what it is asked: `batch(n)` returns half as many samples."""

import torch
from torch import nn


def model():
    return nn.Linear(8, 1)


def batch(n):
    return torch.randn(n // 2, 8), torch.randn(n // 2, 1)
