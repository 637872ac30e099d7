"""Trains, but every rank leaves a daemon: forked twice, in its own session, with an empty environment."""

import os
import sys

import torch
from torch import nn

SLEEP = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def model():
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.closerange(3, 4096)
        os.execve(sys.executable, [sys.executable, "-S", "-c", SLEEP, "a daemon of tests/models/daemon.py"], {})
    os.waitpid(child, 0)
    return nn.Linear(8, 1)


def batch(n):
    return torch.randn(n, 8), torch.randn(n, 1)
