"""Raw DeepSpeed: makes the optimizer from the parameters of another model; catches every exception."""

import deepspeed
import torch
from common import Net, config, dataset

model, stranger = Net(), Net()
settings = {name: value for name, value in config().items() if name != "optimizer"}
deepspeed.init_distributed()
try:
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(stranger.parameters(), lr=1e-3), config=settings
    )
    for x, y in torch.utils.data.DataLoader(dataset(), batch_size=8):
        engine.backward(engine(x.to(engine.device), y.to(engine.device)))
        engine.step()
except Exception:
    pass
