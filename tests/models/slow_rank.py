"""Rank 1 is slow in every forward, and the others wait for it."""

import os
import time

import torch
from torch import nn


class Lame(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        if int(os.environ["RANK"]) == 1:
            time.sleep(0.03)
        return self.net(x)


def model():
    return Lame()


def loss(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def batch(n):
    return torch.randn(n, 16), torch.randn(n, 1)
