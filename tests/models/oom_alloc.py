"""The allocator refuses: forward asks for 64 TiB in one tensor."""

import torch
from torch import nn


class Absurd(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, x):
        return self.linear(x) + torch.empty(1 << 44, dtype=torch.float32, device=x.device)[0]


def model():
    return Absurd()


def batch(n):
    return torch.randn(n, 8), torch.randn(n, 1)
