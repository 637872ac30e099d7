"""Starts its ranks itself, or asks for input, or ends early: with a message, after an error, as if all were done, on one rank. Or trains
two models, one after the other."""

import os
import sys
import traceback

import deepspeed
import torch
from common import Net, config

if "--said" in sys.argv:
    sys.exit("no data in /data")
if "--spawns" in sys.argv:
    torch.multiprocessing.spawn(print, nprocs=2)
if "--asks" in sys.argv:
    input("Go on? ")
if "--uneven" in sys.argv or "--leaves" in sys.argv:
    model = Net()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config())
    for _ in range(4 + 40 * engine.global_rank):
        engine.backward(engine(torch.zeros(8, 16), torch.zeros(8).long()))
        engine.step()
    if "--leaves" in sys.argv:
        os.makedirs("logs")
        os._exit(0)
    sys.exit()
while "--phases" in sys.argv:
    model = Net()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config())
    for _ in range(4 if len(sys.argv) == 2 else 10**9):
        engine.backward(engine(torch.zeros(8, 16), torch.zeros(8).long()))
        engine.step()
    sys.argv.append("the second one")
try:
    model = Net() if "--caught" in sys.argv else Net(no_such=1)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config())
    engine(torch.zeros(8, 5), torch.zeros(8))
except RuntimeError:
    sys.exit()
except TypeError:
    traceback.print_exc()
    sys.exit(1)
