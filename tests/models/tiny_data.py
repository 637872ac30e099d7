"""Has six samples, fewer than most batches."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


def model():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def data():
    return TensorDataset(torch.arange(48.0).view(6, 8) / 48, torch.arange(6.0).view(6, 1) / 6)
