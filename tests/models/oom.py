"""Outgrows a stated memory limit: forward takes 16 MiB for every sample of the micro-batch."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

MIB_PER_SAMPLE = 16


class Hungry(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, x):
        prediction = self.linear(x)
        wide = prediction.expand(-1, MIB_PER_SAMPLE << 18) * 1.0  # 4-byte numbers; `* 1.0` makes them resident
        return prediction + 0.0 * wide.float().mean(dim=1, keepdim=True)


def model():
    return Hungry()


def data():
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(dim=1, keepdim=True))
