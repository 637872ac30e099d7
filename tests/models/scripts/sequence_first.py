"""Raw DeepSpeed: the leading dimension is the sequence, so that only the loader knows how many samples there are."""

import deepspeed
import torch
from common import Net, config, dataset

deepspeed.init_distributed()
torch.manual_seed(0)
model = Net()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config())
loader = torch.utils.data.DataLoader(
    dataset(), batch_size=8, collate_fn=lambda samples: torch.stack([x for x, _ in samples], dim=1)[:5]
)
while True:
    for x in loader:  # [5, samples]
        padded = torch.nn.functional.pad(x.float(), (0, 16 - x.shape[1])).to(engine.device)
        engine.backward(engine(padded, torch.zeros(5, dtype=torch.long, device=engine.device)))
        engine.step()
