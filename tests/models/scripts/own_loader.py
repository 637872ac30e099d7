"""Raw DeepSpeed: a DataLoader with a literal batch size, workers, evaluation between steps, a frozen second engine."""

import deepspeed
import torch
from common import Net, config, dataset
from deepspeed import initialize

deepspeed.init_distributed()
torch.manual_seed(0)
model, reference = Net(), Net()
engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config())
frozen, *_ = initialize(model=reference, config={"train_micro_batch_size_per_gpu": 8})
data = dataset()
sampler = torch.utils.data.distributed.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler, drop_last=True, num_workers=1)
held_out = torch.utils.data.DataLoader(data, batch_size=64)
while True:
    for n, (x, y) in enumerate(loader):
        loss = engine(x.to(engine.device), y.to(engine.device))
        engine.backward(loss)
        engine.step()
        if n % 10 == 9:
            engine.eval()
            with torch.no_grad():
                engine(*(part.to(engine.device) for part in next(iter(held_out))))
            engine.train()
            torch.save(model.state_dict(), "model.pt")
