"""The training that every tuner is given: a small GPT, as one writes it for DeepSpeed; with `--measure N` it prints N step times."""

import argparse
import importlib.util
import json
import time
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--model", type=Path, default=Path(__file__).parents[2] / "studies" / "code-gpt" / "model.py")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--measure", type=int, default=0)
deepspeed.add_config_arguments(parser)
args = parser.parse_args()

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled first, and its files in /dev/shm would stay for ever
torch.set_num_threads(1)
torch.manual_seed(0)
spec = importlib.util.spec_from_file_location("target", args.model)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
deepspeed.init_distributed()
model = module.model()
engine, _, loader, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters(), training_data=module.data())

times, samples, start = [], 0, time.perf_counter()
batches = iter(loader)
while len(times) < (args.measure or args.steps):
    try:
        x, y = next(batches)
    except StopIteration:
        batches = iter(loader)
        continue
    logits = engine(x.to(engine.device))
    loss = F.cross_entropy(logits.float().flatten(0, -2), y.to(engine.device).flatten())
    engine.backward(loss)
    samples += len(x)
    boundary = engine.is_gradient_accumulation_boundary()
    engine.step()
    if boundary:
        deepspeed.get_accelerator().synchronize()
        now = time.perf_counter()
        times.append(now - start)
        start = now
if args.measure and torch.distributed.get_rank() == 0:
    per_step = samples * torch.distributed.get_world_size() / len(times)
    print("MEASURED", json.dumps({"times_s": times, "samples_per_step": per_step}), flush=True)
