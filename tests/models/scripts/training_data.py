"""Raw DeepSpeed: `training_data=`, the path of the configuration in `args.deepspeed_config` or in a flag of its own, `--settings`."""

import argparse
import json
import os
import tempfile

import deepspeed
import torch
from common import Net, config, dataset

parser = argparse.ArgumentParser()
parser.add_argument("--settings")
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
if not args.deepspeed_config:
    args.deepspeed_config = os.path.join(tempfile.mkdtemp(), "ds.json")
    with open(args.deepspeed_config, "w") as file:
        json.dump(
            config(train_batch_size=16 * int(os.environ.get("WORLD_SIZE", "1")), tensorboard={"enabled": True}), file
        )
torch.manual_seed(0)
model = Net()
engine, _, loader, _ = deepspeed.initialize(
    args=None if args.settings else args,
    model=model,
    model_parameters=model.parameters(),
    training_data=dataset(),
    config=args.settings,
)
for _ in range(100):
    for x, y in loader:
        loss = engine(x.to(engine.device), y.to(engine.device))
        engine.backward(loss)
        engine.step()
