"""Fails to build: an exception in `model()`."""

import torch


def model():
    raise FileNotFoundError("no pretrained weights at weights.pt")


def batch(n):
    return torch.randn(n, 8), torch.randn(n, 1)
