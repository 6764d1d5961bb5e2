"""Train a small network with MKOR around SGD."""

import torch
from torch import nn

import mkor

torch.manual_seed(0)
inputs = torch.randn(256, 10)
targets = inputs.sin().sum(dim=1, keepdim=True)

model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = mkor.MKOR(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))

for step in range(101):
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0:
        print(f"step {step:3d}  loss {loss.item():.4f}")
