"""Raw DeepSpeed: a script that seeds nothing, whose model and data come from all three generators."""

import random

import deepspeed
import numpy as np
import torch
from common import Net, config

deepspeed.init_distributed()
model = Net()
model.head.weight.data.mul_(1 + random.random())
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config())
while True:
    x = torch.from_numpy(np.random.standard_normal((8, 16))).float()
    engine.backward(engine(x.to(engine.device), (torch.arange(8) % 4).to(engine.device)))
    engine.step()
