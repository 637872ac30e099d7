"""Raw DeepSpeed: a PipelineModule, `--stages` of them, `training_data=` or an own loader, evaluation between steps."""

import argparse
import os

import deepspeed
import torch
from common import Block, config, dataset
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--stages", type=int, default=2)
parser.add_argument("--recompute", type=int, default=0)
parser.add_argument("--own-loader", action="store_true")
parser.add_argument("--steps", type=int, default=10**6)
args = parser.parse_args()
deepspeed.init_distributed()
torch.manual_seed(0)
layers = [LayerSpec(nn.Linear, 16, 16), *(LayerSpec(Block, 16) for _ in range(3)), LayerSpec(nn.Linear, 16, 4)]
model = PipelineModule(
    layers, num_stages=args.stages, loss_fn=nn.functional.cross_entropy, activation_checkpoint_interval=args.recompute
)
training_data = None if args.own_loader else dataset()
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=[p for p in model.parameters() if p.requires_grad],
    config=config(),
    training_data=training_data,
)
data = None
if args.own_loader:
    share = {"num_replicas": engine.grid.data_parallel_size, "rank": engine.grid.data_parallel_id}
    sampler = torch.utils.data.distributed.DistributedSampler(dataset(), shuffle=False, **share)
    loader = torch.utils.data.DataLoader(dataset(), batch_size=8, sampler=sampler)
    data = iter(deepspeed.utils.RepeatingLoader(loader))
held_out = iter(
    deepspeed.utils.RepeatingLoader(
        torch.utils.data.DataLoader(dataset(), batch_size=engine.train_micro_batch_size_per_gpu())
    )
)
for step in range(args.steps):
    loss = engine.train_batch(data_iter=data)
    if os.environ.get("PRINT_LOSSES") and engine.global_rank == 0:
        print("loss", repr(loss.item()), flush=True)
    if step % 10 == 9:
        engine.eval_batch(data_iter=held_out)
