"""Hangs, deaf to whatever asks it to end: rank 1 sleeps for ever in its third forward, and the others wait for it."""

import os
import signal
import time

import torch
from torch import nn

BAD_RANK, BAD_STEP = 1, 3


class Hanging(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        while self.calls == BAD_STEP and int(os.environ["RANK"]) == BAD_RANK:
            time.sleep(3600)
        return self.linear(x)


def model():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    return Hanging()


def batch(n):
    return torch.randn(n, 8), torch.randn(n, 1)
