"""Train under FSDP2, save, and load: torchrun --nproc-per-node 2 examples/fsdp2.py."""

import os
import shutil
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import mkor

gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else "cpu"
if gpu:
    torch.cuda.set_device(device)
if "RANK" in os.environ:  # started by torchrun
    dist.init_process_group("nccl" if gpu else "gloo")
else:
    store = dist.HashStore()
    dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=0, world_size=1)
rank, workers = dist.get_rank(), dist.get_world_size()


def build():
    """A sharded model and its optimizer; the line that builds it is that of one worker."""
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, mkor.MKOR(model, base, representation="lowrank", rank=16)


def state_of(model, optimizer):
    """What a checkpoint holds; `optimizer.factors` is read and written by dcp itself."""
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer.base),
        "factors": optimizer.factors,
    }


torch.manual_seed(0)
inputs = torch.randn(256, 10)
targets = inputs.sin().sum(dim=1, keepdim=True)
share = slice(rank, None, workers)  # each worker has rows of its own
inputs, targets = inputs[share].to(device), targets[share].to(device)

folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder, src=0)
model, optimizer = build()
for step in range(101):
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0 and rank == 0:
        print(f"step {step:3d}  loss {loss.item():.4f}")
    if step == 50:
        dcp.save(state_of(model, optimizer), checkpoint_id=folder[0])
        model, optimizer = build()  # as a run does that starts from the checkpoint
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=folder[0])
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer.base, state["optimizer"])

dist.barrier()
if rank == 0:
    shutil.rmtree(folder[0])
dist.destroy_process_group()
if not gpu:  # FSDP2 keeps gloo's threads, which may abort at the interpreter's end
    sys.stdout.flush()
    os._exit(0)
