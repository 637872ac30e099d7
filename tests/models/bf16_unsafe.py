"""Trains in fp32 only: a Cholesky factorisation, which has no 16-bit version, meets 16-bit weights with an error."""

import torch
from torch import nn


class Covariance(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.linear(x)
        square = hidden.mT @ hidden + torch.eye(4, device=x.device, dtype=hidden.dtype)
        return torch.linalg.cholesky(square).diagonal().log().sum() + hidden.square().mean()


def model():
    return Covariance()


def batch(n):
    return torch.randn(n, 8)
