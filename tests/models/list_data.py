"""Trains on a plain list of samples."""

import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def data():
    return [(torch.tensor([i % 3, i % 5, i % 7, 1.0]), i % 3) for i in range(300)]
