"""What the tests of errors share: a model, its optimizer, and a state that can be compared."""

import torch
from torch import nn


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


def train(model, optimizer, steps=2):
    for _ in range(steps):
        model(torch.randn(6, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def flat(value, path=""):
    """A nested state as pairs of a path and a comparable value."""
    if isinstance(value, dict):
        return [pair for k, v in value.items() for pair in flat(v, f"{path}.{k}")]
    if isinstance(value, (list, tuple)):
        return [pair for i, v in enumerate(value) for pair in flat(v, f"{path}.{i}")]
    return [(path, value.tolist() if isinstance(value, torch.Tensor) else value)]
