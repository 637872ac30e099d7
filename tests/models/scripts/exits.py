"""Ends itself by sys.exit: with the status 1 after an error that it shows, as Hydra's `main` does, or with a message."""

import sys
import traceback

import deepspeed
from common import Net

if "--said" in sys.argv:
    sys.exit("no data in /data")
try:
    engine, *_ = deepspeed.initialize(model=Net(no_such=1))
    engine.backward(None)
except TypeError:
    traceback.print_exc()
    sys.exit(1)
