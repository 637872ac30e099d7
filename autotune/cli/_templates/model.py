"""What `autotune` trains to measure a configuration. Replace the bodies by your own; only `model` and `data` are required.

Try it: `autotune check study.yaml`, then `autotune run study.yaml`.
"""

import torch
from torch import nn
from torch.utils.data import Dataset

WIDTH, LAYERS, CLASSES = 256, 6, 10


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Points(Dataset):
    """Random points; the class of each says which of its first coordinates is the largest."""

    def __init__(self):
        self.points = torch.randn(20_000, WIDTH, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        point = self.points[index]
        return point, int(point[:CLASSES].argmax())


def model():
    """The model, freshly built: on the CPU, in fp32, not wrapped in anything. DeepSpeed moves and converts it."""
    return Net()


def data():
    """The training set: a Dataset or a list, of tensors, tuples or dicts. Never a DataLoader: the batch size is being tuned.

    Keep it quick, since every rank of every trial calls it. What downloads or tokenises belongs into a step before.
    Without a data set, define `batch(n)` instead: a batch of n samples.
    """
    return Points()


# Everything below is optional.


def optimizer(params):
    """Your optimizer, unless your DeepSpeed JSON has one; without either, AdamW."""
    return torch.optim.AdamW(params, lr=1e-3)


# def loss(model, batch):
#     """The loss to minimise. Without it: the loss that the model returns, else cross-entropy for integer targets, else
#     the mean squared error."""
#     x, y = batch
#     return nn.functional.cross_entropy(model(x), y)


# def collate(samples):
#     """Makes a batch of a list of samples, for example by padding. Without it, torch's default."""
#     return torch.utils.data.default_collate(samples)


# The repeated blocks whose activations may be recomputed rather than kept, by class name. Without it, they are found.
# blocks = ["Block"]
