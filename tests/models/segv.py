"""Crashes without a word: rank 1 dies of SIGSEGV in its third forward."""

import os
import signal

import torch
from torch import nn

BAD_RANK, BAD_STEP = 1, 3


class Faulting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == BAD_STEP and int(os.environ["RANK"]) == BAD_RANK:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSEGV)
        return self.linear(x)


def model():
    return Faulting()


def batch(n):
    return torch.randn(n, 8), torch.randn(n, 1)
