"""The base of models that misbehave: a linear layer that calls a function before each forward."""

import os

from torch import nn


class Faulty(nn.Module):
    """Calls `fault(number of the forward)` in one rank, or in all; a factor that it returns multiplies the output."""

    def __init__(self, fault, rank=None):
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.fault, self.rank, self.calls = fault, rank, 0

    def forward(self, x):
        self.calls += 1
        chosen = self.rank is None or int(os.environ["RANK"]) == self.rank
        return self.linear(x) * ((self.fault(self.calls) if chosen else None) or 1.0)
