"""A small model of every kind of layer that `mkor.auto` tells apart, and its training."""

import torch
from torch import nn


class Small(nn.Module):
    """An embedding, a convolution, a norm, an attention and two linear layers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.convolution = nn.Conv1d(8, 8, 3, padding=1, bias=False)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.hidden = nn.Linear(8, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens):
        x = self.convolution(self.embedding(tokens).mT).mT
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(self.hidden(x).tanh())


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(9, (4, 5), generator=generator)


def small(seed=0):
    torch.manual_seed(seed)
    return Small()


def take_steps(model, optimizer, count, first=0):
    losses = []
    for seed in range(first, first + count):
        optimizer.zero_grad()
        loss = model(batch(seed)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def groups_by_name(model, optimizer):
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        names[id(p)]: group["update"] for group in optimizer.param_groups for p in group["params"]
    }
