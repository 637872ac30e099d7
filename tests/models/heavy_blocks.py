"""Blocks that compute for long beside a small optimizer: recomputing them costs a quarter of the step."""

import torch
from torch import nn

WIDTH = 192


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        return x + self.net(x)


def model():
    return nn.Sequential(*(Block() for _ in range(4)))


blocks = ["Block"]


def loss(model, batch):
    return nn.functional.mse_loss(model(batch), batch)


def batch(n):
    return torch.randn(n, 64, WIDTH)


def optimizer(params):
    return torch.optim.SGD(params, lr=1e-3, foreach=True)
