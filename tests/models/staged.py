"""Trains: a PipelineModule of six layers in two stages, on pairs of inputs and labels."""

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def model():
    layers = [LayerSpec(nn.Embedding, 96, 32), *(LayerSpec(Block, 32) for _ in range(4)), LayerSpec(nn.Linear, 32, 96)]

    def loss(out, y):
        return nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())

    return PipelineModule(layers, num_stages=2, loss_fn=loss)


def data():
    generator = torch.Generator().manual_seed(7)
    return [(x, x) for x in torch.randint(1, 96, (512, 16), generator=generator)]
