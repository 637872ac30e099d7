"""Trains the head only: the body's parameters are frozen."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


def model():
    body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    body.requires_grad_(False)
    return nn.Sequential(body, nn.Linear(64, 1))


def data():
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.mean(dim=1, keepdim=True))
