"""Raw DeepSpeed without argparse: unusual flags, and a configuration from a file or with arg_mappings."""

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
from common import Net, config, dataset

flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
rows = int(flags.get("--rows") or flags.get("--train.batch-size") or os.environ.get("ROWS") or 8)
settings = config(zero_optimization={"stage": 1})
if "--train.accum" in flags:
    settings["gradient_accumulation_steps"] = int(flags["--train.accum"])
if "--conf" in flags:
    settings = json.loads(Path(flags["--conf"]).read_text())
elif "--mapped" in flags:
    settings["autotuning"] = {"enabled": True, "arg_mappings": {"train_micro_batch_size_per_gpu": "--rows"}}
print("flags", flags, flush=True)
deepspeed.init_distributed()
torch.manual_seed(0)
model = Net()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
loader = torch.utils.data.DataLoader(dataset(), batch_size=rows) if "--loader" in flags else None
while True:
    for x, y in loader or [(torch.randn(rows, 16), torch.zeros(rows, dtype=torch.long))]:
        engine.backward(engine(x.to(engine.device), y.to(engine.device)))
        engine.step()
