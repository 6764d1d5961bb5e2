"""A small network, its optimizer and a worker's batches, for tests of several workers."""

import torch
from torch import nn

import mkor


def net():
    torch.manual_seed(1)
    layers = [nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5, bias=False), nn.Tanh(), nn.Linear(5, 2)]
    return nn.Sequential(*layers).double()


def build(model, method="MKOR", **options):
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return getattr(mkor, method)(model, base, factor_update_steps=2, warmup_steps=3, **options)


def batch(worker, step, rows):
    source = torch.Generator().manual_seed(10 * step + worker)
    return torch.randn(rows, 4, dtype=torch.float64, generator=source)
