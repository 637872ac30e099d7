"""Imports DeepSpeed without using it."""

import deepspeed  # noqa: F401
import torch

torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
