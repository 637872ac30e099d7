"""A training that every tuner is given, as one writes it for DeepSpeed: a small GPT, or the model of `--model`."""

import argparse
import importlib.util
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--model", type=Path, default=Path(__file__).parents[2] / "studies" / "code-gpt" / "model.py")
parser.add_argument("--steps", type=int, default=200)
deepspeed.add_config_arguments(parser)
args = parser.parse_args()

torch.manual_seed(0)
spec = importlib.util.spec_from_file_location("target", args.model)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
deepspeed.init_distributed()
model = module.model()
engine, _, loader, _ = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters(), training_data=module.data()
)

while engine.global_steps < args.steps:
    for x, y in loader:
        dtype = next(engine.parameters()).dtype if x.is_floating_point() else x.dtype
        logits = engine(x.to(engine.device, dtype))
        loss = F.cross_entropy(logits.float().flatten(0, -2), y.to(engine.device).flatten())
        engine.backward(loss)
        engine.step()
        if engine.global_steps >= args.steps:
            break
