"""Raw DeepSpeed: rank 0 caches data for all ranks; old checkpoints are removed, weights and a log written during training."""

import os
import shutil
import sys

import deepspeed
import torch
from common import Net, config, dataset

deepspeed.init_distributed()
shutil.rmtree("out/checkpoints", ignore_errors=True)
os.makedirs("out/checkpoints", exist_ok=True)
if int(os.environ["RANK"]) == 0:
    torch.save(dataset().tensors, "out/cache.pt")
torch.distributed.barrier()
data = torch.utils.data.TensorDataset(*torch.load("out/cache.pt"))
torch.manual_seed(0)
model = Net()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config())
sampler = torch.utils.data.distributed.DistributedSampler(data)
for x, y in torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler):
    engine.backward(engine(x.to(engine.device), y.to(engine.device)))
    engine.step()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    whole = model if "--reload" in sys.argv else weights
    torch.save({"epoch": 1, "weights": whole}, "out/checkpoints/last.pt")
    os.replace("out/checkpoints/last.pt", "out/checkpoints/best.pt")
    torch.save(torch.get_rng_state(), f"out/rng-{os.environ['RANK']}.tmp")
    os.rename(f"out/rng-{os.environ['RANK']}.tmp", f"out/rng-{os.environ['RANK']}.pt")
    torch.set_rng_state(torch.load(f"out/rng-{os.environ['RANK']}.pt"))
    if "--log" in sys.argv:
        with open("out/log.txt", "a") as log:
            log.write("step\n")
    if "--reload" in sys.argv:
        torch.load("out/checkpoints/best.pt")
