"""A convolutional classifier of handwritten digits: real images that scikit-learn carries, so nothing is downloaded."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

WIDTH, STAGES, CLASSES, SIDE = 32, 3, 10, 16


class Stage(nn.Module):
    """Two convolutions and the stream around them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(8, WIDTH)
        self.second = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(8, WIDTH)

    def forward(self, x):
        inner = F.relu(self.norm1(self.first(x)))
        return F.relu(x + self.norm2(self.second(inner)))


class Classifier(nn.Module):
    """Images of one channel in, logits of the ten digits out."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.stages = nn.ModuleList(Stage() for _ in range(STAGES))
        self.head = nn.Linear(WIDTH * 4 * 4, CLASSES)

    def forward(self, images):
        x = self.stem(images)
        for stage in self.stages:
            x = stage(x)
        return self.head(F.adaptive_avg_pool2d(x, 4).flatten(1))


def model():
    return Classifier()


def data():
    from sklearn.datasets import load_digits  # pip install scikit-learn

    digits = load_digits()
    # Scaled from 8 x 8 to 16 x 16 pixels, so that a step has something to compute.
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(
        F.interpolate(images, size=(SIDE, SIDE), mode="bilinear", align_corners=False), torch.tensor(digits.target)
    )


def loss(model, batch):
    images, digits = batch
    return F.cross_entropy(model(images).float(), digits)


def optimizer(params):
    return torch.optim.Adam(params, lr=2e-3)
