"""Returns half as many samples as `batch(n)` is asked for."""

import torch
from torch import nn


def model():
    return nn.Linear(8, 1)


def batch(n):
    return torch.randn(n // 2, 8), torch.randn(n // 2, 1)
