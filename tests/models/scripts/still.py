"""Trains the model of `../still.py`, whose weights stay, as a script, backward by the engine or plainly."""

import argparse
import sys
from pathlib import Path

import deepspeed
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import still

parser = argparse.ArgumentParser()
parser.add_argument("--plain", action="store_true")
args = parser.parse_args()
model = still.model()
optimizer = still.optimizer(model.parameters())
config = {
    "train_micro_batch_size_per_gpu": 64,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": int(args.plain)},
}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
loader = engine.deepspeed_io(still.data(), num_local_io_workers=0)
for _ in range(100):
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(engine(x.to(engine.device)), y.to(engine.device))
        if args.plain:
            loss.backward()
        else:
            engine.backward(loss)
        engine.step()
