"""Train under DistributedDataParallel: torchrun --nproc-per-node 2 examples/ddp.py."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mkor

gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else "cpu"
if gpu:
    torch.cuda.set_device(device)
if "RANK" in os.environ:  # started by torchrun
    dist.init_process_group("nccl" if gpu else "gloo")
workers = dist.get_world_size() if dist.is_initialized() else 1
rank = dist.get_rank() if dist.is_initialized() else 0

torch.manual_seed(0)
inputs = torch.randn(256, 10)
targets = inputs.sin().sum(dim=1, keepdim=True)
share = slice(rank, None, workers)  # each worker has rows of its own
inputs, targets = inputs[share].to(device), targets[share].to(device)


def train():
    """Train, and let go of the model."""
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    model = DistributedDataParallel(model) if workers > 1 else model
    optimizer = mkor.MKOR(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    for step in range(101):
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 and rank == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")


train()  # the model ends with it, before the process group, which may wait for it without end

if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
