"""A fork bomb: every process of rank 0 forks again and again, each in a session of its own, so that no signal to a group meets them.

It goes out by itself after some seconds, or when the machine has a thousand tasks, should nobody end it.
"""

import os
import time

import torch
from torch import nn

BAD_RANK, BAD_STEP, LAST_S, MOST_TASKS = 0, 3, 10.0, 1000


def explode():
    until = time.monotonic() + LAST_S
    while time.monotonic() < until:
        with open("/proc/loadavg") as file:
            if int(file.read().split()[3].partition("/")[2]) < MOST_TASKS and os.fork() == 0:
                os.setsid()
        time.sleep(0.05)
    os._exit(0)


class Exploding(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == BAD_STEP and int(os.environ["RANK"]) == BAD_RANK:
            explode()
        return self.linear(x)


def model():
    return Exploding()


def batch(n):
    return torch.randn(n, 8), torch.randn(n, 1)
