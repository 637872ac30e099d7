"""Trains, but every rank leaves shared memory and a child that outlives it: own session, ignores SIGTERM."""

import os
import subprocess
import sys

import torch
from torch import nn

CHILD = (
    "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (signal.SIGTERM, signal.SIGHUP)]; time.sleep(600)"
)


def model():
    with open(f"/dev/shm/torch_{os.getpid()}_children_0", "wb") as file:  # called as torch calls its own
        file.write(bytes(4096))
    subprocess.Popen(
        [sys.executable, "-S", "-c", CHILD, "a child of tests/models/children.py"],
        start_new_session=True,
        close_fds=False,
    )
    return nn.Linear(8, 1)


def batch(n):
    return torch.randn(n, 8), torch.randn(n, 1)
