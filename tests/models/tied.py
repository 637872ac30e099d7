"""Trains: input and output embedding are one tensor, which counts once."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

WORDS, WIDTH = 50, 16


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.relu(self.hidden(self.embedding(tokens))))


def model():
    return Tied()


def data():
    tokens = torch.randint(WORDS, (512, 9), generator=torch.Generator().manual_seed(0))
    return TensorDataset(tokens, (tokens + 1) % WORDS)
