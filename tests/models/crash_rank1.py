"""Crashes: rank 1 raises in its third forward; the errors of the other ranks are an echo."""

import torch
from faults import Faulty


def fault(n):
    if n == 3:
        raise ValueError("rank 1 dislikes this batch")


def model():
    return Faulty(fault, rank=1)


def batch(n):
    return torch.randn(n, 8), torch.randn(n, 1)
