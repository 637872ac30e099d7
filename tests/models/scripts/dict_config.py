"""Raw DeepSpeed: a dict, an own DataLoader, `--batch_size`, `engine.backward`; prints its losses, for comparison."""

import argparse
import os

import deepspeed
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--local_rank", type=int, default=-1)
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Net()
    data = [
        (torch.randn(16), i % 4) for i in range(100)
    ]  # 100 is not a multiple of 8: every epoch ends with a smaller batch
    config = {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    sampler = torch.utils.data.distributed.DistributedSampler(data, shuffle=False)
    loader = torch.utils.data.DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    step = 0
    while step < args.steps:
        for x, y in loader:
            loss = nn.functional.cross_entropy(engine(x.to(engine.device)), y.to(engine.device))
            engine.backward(loss)
            engine.step()
            if os.environ.get("PRINT_LOSSES"):
                print("loss", repr(loss.item()), flush=True)
            step += 1
            if step >= args.steps:
                break
        engine.save_checkpoint("checkpoints")


if __name__ == "__main__":
    main()
