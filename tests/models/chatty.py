"""Trains, and prints 20 MB to each of stdout and stderr in every rank."""

import os
import sys

import torch
from faults import Faulty

MEGABYTE = ("x" * 99 + "\n") * 10_000


def fault(n):
    if n <= 5:
        for _ in range(4):
            sys.stdout.write(MEGABYTE)
            sys.stderr.write(MEGABYTE)
        os.write(1, b"straight to the descriptor\n")


def model():
    return Faulty(fault)


def batch(n):
    return torch.randn(n, 8), torch.randn(n, 1)
