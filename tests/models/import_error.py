"""Fails to load: imports a package that is not installed."""

import a_package_that_nobody_has
import torch


def model():
    return a_package_that_nobody_has.Model()


def batch(n):
    return torch.randn(n, 8), torch.randn(n, 1)
