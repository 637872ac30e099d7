"""Raw DeepSpeed: cuts each batch into parts, each an optimizer step of its own: how it does so is in the arguments."""

import argparse

import deepspeed
import torch
from common import Net, config, dataset

PART = 8
BIG = 24
parser = argparse.ArgumentParser()
parser.add_argument("--parts", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--style", default="chunk", choices=["chunk", "follow", "split", "hand-made", "pairs"])
parser.add_argument("--samples", type=int, default=96)
given = parser.parse_args()
deepspeed.init_distributed()
torch.manual_seed(0)
model = Net()
own = config(train_micro_batch_size_per_gpu=BIG // given.parts, gradient_accumulation_steps=given.accumulate)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=own)
data = torch.utils.data.Subset(dataset(), range(given.samples))


def batches():
    if given.style == "hand-made":
        xs, ys = torch.utils.data.default_collate(list(data))
        for first in range(0, given.samples - BIG + 1, BIG):
            yield xs[first : first + BIG], ys[first : first + BIG]
        return
    yield from torch.utils.data.DataLoader(data, batch_size=BIG)


def parts(batch):
    if given.style == "split":
        yield from zip(*(each.split(PART) for each in batch), strict=True)
    else:
        n = engine.gradient_accumulation_steps() if given.style == "follow" else given.parts
        yield from zip(*(each.chunk(n) for each in batch), strict=True)


while True:
    drawn = batches()
    for batch in drawn:
        pair = (torch.cat(two) for two in zip(batch, next(drawn), strict=True)) if given.style == "pairs" else ()
        for x, y in [pair] if pair else parts(batch):
            engine.backward(engine(x.to(engine.device), y.to(engine.device)))
            engine.step()
