"""A small network whose samples take 20 ms each to load, as pictures from a slow disk do."""

import time

import torch
from torch import nn
from torch.utils.data import Dataset

SAMPLE_S = 0.02


class Slow(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(SAMPLE_S)
        return torch.full((64,), index / 4096), torch.tensor(index % 10)


def model():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def data():
    return Slow()
