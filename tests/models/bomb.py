"""A fork bomb: every process of rank 0 forks again and again, each into its own session, out of reach of group signals.

It ends by itself after some seconds, or when the machine has a thousand tasks, if nobody ends it.
"""

import os
import time

import torch
from faults import Faulty

LAST_S, MOST_TASKS = 10.0, 1000


def fault(n):
    if n != 3:
        return
    until = time.monotonic() + LAST_S
    while time.monotonic() < until:
        with open("/proc/loadavg") as file:
            if int(file.read().split()[3].partition("/")[2]) < MOST_TASKS and os.fork() == 0:
                os.setsid()
        time.sleep(0.05)
    os._exit(0)


def model():
    return Faulty(fault, rank=0)


def batch(n):
    return torch.randn(n, 8), torch.randn(n, 1)
