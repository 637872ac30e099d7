"""What the scripts beside it share: a tiny model and its data."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class Net(nn.Module):
    """Gives the loss itself."""

    def __init__(self, width=16):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.head = nn.Linear(width, 4)

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), y)


def dataset(n=4096, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.utils.data.TensorDataset(torch.randn(n, 16, generator=generator), torch.arange(n) % 4)


def config(**more):
    return {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        **more,
    }
