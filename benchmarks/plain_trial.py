"""The trial that benchmarks compare with, as one writes it by hand: torchrun starts this file on every rank.

Prints the seconds of each step. On a device only sums from step `SETTLING` to the last one are wall time: steps between
are not waited for.
"""

import atexit
import importlib.util
import itertools
import json
import os
import sys
import time
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F

SETTLING = 5


def main() -> None:
    target, config_file, n_steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would leak /dev/shm, and be compiled first
    spec = importlib.util.spec_from_file_location("target", target)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    deepspeed.init_distributed()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = json.loads(Path(config_file).read_text())
    model = module.model()
    optimizer = module.optimizer(model.parameters()) if hasattr(module, "optimizer") else None
    parameters = None if optimizer else model.parameters()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=parameters, config=config)
    dataset, micro = module.data(), config["train_micro_batch_size_per_gpu"]
    dtype = next(engine.module.parameters()).dtype
    marks = [time.perf_counter()]
    for step in range(n_steps):
        for part in range(config["gradient_accumulation_steps"]):
            first = ((step * config["gradient_accumulation_steps"] + part) * world + rank) * micro
            x, y = torch.utils.data.default_collate([dataset[i % len(dataset)] for i in range(first, first + micro)])
            x, y = x.to(engine.device), y.to(engine.device)
            if x.is_floating_point():
                x = x.to(dtype)
            output = engine(x)
            if y.is_floating_point():
                loss = F.mse_loss(output.float(), y)
            elif output.dim() > 2:
                loss = F.cross_entropy(output.float().flatten(0, -2), y.flatten())
            else:
                loss = F.cross_entropy(output.float(), y)
            engine.backward(loss)
            engine.step()
        if step in (SETTLING - 1, n_steps - 1):  # as a training runs: the device is waited for at both ends only
            deepspeed.get_accelerator().synchronize()
        marks.append(time.perf_counter())
    if rank == 0:
        print("STEPS", json.dumps([end - start for start, end in itertools.pairwise(marks)]), flush=True)
    # One in forty ordinary exits aborts: a thread of gloo lets go of a tensor while the interpreter is finalised.
    atexit.register(os._exit, 0)


if __name__ == "__main__":
    main()
