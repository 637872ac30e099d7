"""Trains with every optional function: uneven samples, `collate`, a masked loss, SGD, and named blocks."""

import torch
from torch import nn
from torch.utils.data import Dataset

blocks = ["Layer"]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x):
        return self.second(self.first(x)).sum(dim=-1)


class Uneven(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.randn(1 + index % 7, 12, generator=torch.Generator().manual_seed(index))


def model():
    return Net()


def data():
    return Uneven()


def collate(samples):
    padded = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    lengths = torch.tensor([len(sample) for sample in samples])
    return {"x": padded, "mask": torch.arange(padded.size(1)) < lengths[:, None]}


def loss(model, batch):
    error = (model(batch["x"]) - batch["x"].mean(dim=-1)).float().square()
    return error[batch["mask"]].mean()


def optimizer(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)
