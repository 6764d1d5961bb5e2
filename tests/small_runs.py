"""A small regression and the loop that trains it, for the tests of the public face."""

import torch
import torch.nn.functional as F
from torch import nn

import mkor


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3, bias=False))


def data(steps, rows=6):
    source = torch.Generator().manual_seed(2)
    return [
        (torch.randn(rows, 5, generator=source) + 0.5, torch.randn(rows, 3, generator=source))
        for _ in range(steps)
    ]


def backward(model, batch):
    loss = F.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    return loss


def train(model, optimizer, batches):
    for batch in batches:
        backward(model, batch)
        optimizer.step()
        optimizer.zero_grad()


def same(left, right):
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def sgd(model, lr=0.1, **options):
    return mkor.MKOR(model, torch.optim.SGD(model.parameters(), lr=lr), **options)
