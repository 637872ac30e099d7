"""Crashes without a message: rank 1 dies of SIGSEGV in its third forward."""

import os
import signal

import torch
from faults import Faulty


def fault(n):
    if n == 3:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)


def model():
    return Faulty(fault, rank=1)


def batch(n):
    return torch.randn(n, 8), torch.randn(n, 1)
