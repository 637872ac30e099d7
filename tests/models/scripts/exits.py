"""Starts its ranks itself, or ends by sys.exit: with a message, or with status 1 after an error, as Hydra's `main` does."""

import sys
import traceback

import deepspeed
import torch
from common import Net

if "--said" in sys.argv:
    sys.exit("no data in /data")
if "--spawns" in sys.argv:
    torch.multiprocessing.spawn(print, nprocs=2)
try:
    engine, *_ = deepspeed.initialize(model=Net(no_such=1))
    engine.backward(None)
except TypeError:
    traceback.print_exc()
    sys.exit(1)
