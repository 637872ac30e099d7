"""Hangs and ignores signals: rank 1 sleeps for ever in its third forward, and the others wait for it."""

import signal
import time

import torch
from faults import Faulty


def fault(n):
    while n == 3:
        time.sleep(3600)


def model():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    return Faulty(fault, rank=1)


def batch(n):
    return torch.randn(n, 8), torch.randn(n, 1)
