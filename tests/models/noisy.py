"""Trains with step times that scatter: each forward sleeps 5 ms, and one in five about 20 ms more."""

import random
import time

import torch
from faults import Faulty

numbers = random.Random(0)


def fault(_):
    time.sleep(0.005 + (numbers.uniform(0.01, 0.03) if numbers.random() < 0.2 else 0.0))


def model():
    return Faulty(fault)


def batch(n):
    return torch.randn(n, 8), torch.randn(n, 1)
