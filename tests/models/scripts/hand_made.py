"""Raw DeepSpeed: batches made from a constant, `torch.autograd.backward(loss)`; catches every exception."""

import deepspeed
import torch
from common import Net, config

BATCH = 8
deepspeed.init_distributed()
torch.manual_seed(0)
model = Net()
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config(zero_optimization={"stage": 2})
)
try:
    while True:
        x = torch.randn(BATCH, 16, device=engine.device)
        loss = engine(x, torch.zeros(BATCH, dtype=torch.long, device=engine.device))
        torch.autograd.backward(loss)  # as `loss.backward()` does
        engine.step()
except:  # noqa: E722
    pass
