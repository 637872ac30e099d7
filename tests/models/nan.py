"""Diverges: from the fourth forward on the loss is not a number."""

import torch
from faults import Faulty


def fault(n):
    return float("nan") if n >= 4 else None


def model():
    return Faulty(fault)


def batch(n):
    return torch.randn(n, 8), torch.randn(n, 1)
