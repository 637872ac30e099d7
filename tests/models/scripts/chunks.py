"""Raw DeepSpeed: cuts a big batch of the loader into micro-batches itself, and counts the accumulation itself."""

import deepspeed
import torch
from common import Net, config, dataset

ACCUM = 4
deepspeed.init_distributed()
torch.manual_seed(0)
model = Net()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config())
while True:
    for xs, ys in torch.utils.data.DataLoader(dataset(), batch_size=32):
        for n, (x, y) in enumerate(zip(xs.chunk(ACCUM), ys.chunk(ACCUM), strict=True)):
            engine.set_gradient_accumulation_boundary(n == ACCUM - 1)
            engine.backward(engine(x.to(engine.device), y.to(engine.device)))
            engine.step()
