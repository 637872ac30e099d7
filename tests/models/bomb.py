"""A fork bomb: every process of rank 0 forks again and again, each into its own session, out of reach of group signals.

It ends by itself after some seconds, or when the machine has a thousand tasks more, if nobody ends it.
"""

import os
import time

import torch
from faults import Faulty

LAST_S, MOST_MORE = 10.0, 1000


def n_tasks():
    with open("/proc/loadavg") as file:
        return int(file.read().split()[3].partition("/")[2])


def fault(n):
    if n != 3:
        return
    until, most = time.monotonic() + LAST_S, n_tasks() + MOST_MORE
    while time.monotonic() < until:
        if n_tasks() < most and os.fork() == 0:
            os.setsid()
        time.sleep(0.2)
    os._exit(0)


def model():
    return Faulty(fault, rank=0)


def batch(n):
    return torch.randn(n, 8), torch.randn(n, 1)
