"""Raw DeepSpeed: clips the norm of its gradients itself, and keeps its weights within bounds, as WGANs do."""

import deepspeed
import torch
from common import Net, config, dataset
from torch.nn.utils import clip_grad_norm_

deepspeed.init_distributed()
torch.manual_seed(0)
model = Net()
own = config(gradient_accumulation_steps=1)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=own)
while True:
    for x, y in torch.utils.data.DataLoader(dataset(), batch_size=8):
        engine.backward(engine(x.to(engine.device), y.to(engine.device)))
        clip_grad_norm_(model.parameters(), 0.05)
        engine.step()
        for weight in model.parameters():
            weight.data.clamp_(-0.1, 0.1)
