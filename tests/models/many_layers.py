"""Many small layers: with buckets smaller than a layer each of them is a message of its own."""

import torch
from torch import nn

WIDTH, LAYERS = 48, 120


def model():
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def loss(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def batch(n):
    return torch.randn(n, WIDTH), torch.randn(n, 1)


def optimizer(params):
    return torch.optim.SGD(params, lr=1e-3, foreach=True)
