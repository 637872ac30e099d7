"""Raw DeepSpeed: `zero.Init` at stage 3 in bf16, the batch read from the engine, sequences first."""

import deepspeed
import torch
from common import Net, config

SETTINGS = config(zero_optimization={"stage": 3}, bf16={"enabled": True})
deepspeed.init_distributed()
torch.manual_seed(0)
with deepspeed.zero.Init(config_dict_or_path=SETTINGS):
    model = Net()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=SETTINGS)
while True:
    n = engine.train_micro_batch_size_per_gpu()
    x = torch.randn(n, 16, device=engine.device, dtype=torch.bfloat16)
    loss = engine(x, torch.zeros(n, dtype=torch.long, device=engine.device))
    engine.backward(loss)
    engine.step()
