"""A small convolutional net on synthetic images whose activations, not its parameters, fill the memory."""

import torch
from torch import nn
from torch.utils.data import Dataset

CHANNELS, BLOCKS, SIDE, CLASSES = 24, 6, 32, 8


class Block(nn.Module):
    """Two convolutions beside a short cut; GroupNorm, which computes in 16 bits too."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False),
            nn.GroupNorm(4, CHANNELS),
            nn.GELU(),
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False),
            nn.GroupNorm(4, CHANNELS),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


class Net(nn.Module):
    """Images in, class scores out."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(CHANNELS, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))


class Waves(Dataset):
    """Noise, and on it a wave whose direction is the class."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        label = index % CLASSES
        angle = torch.tensor(torch.pi * label / CLASSES)
        across = torch.arange(SIDE) / SIDE
        phase = 6 * torch.pi * (across[:, None] * torch.sin(angle) + across[None, :] * torch.cos(angle))
        shift = 2 * torch.pi * torch.rand(1, generator=generator)
        return torch.sin(phase + shift) + torch.randn(3, SIDE, SIDE, generator=generator), label


def model():
    return Net()


def data():
    return Waves()


def loss(net, batch):
    images, labels = batch
    return nn.functional.cross_entropy(net(images).float(), labels)
