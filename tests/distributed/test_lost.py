"""Workers that end, or don't come: those that are left say the same, in seconds."""

import datetime
import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import mkor
from gloo import spawn
from mkor.distributed.guard import guarded

LIMIT = 4


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def build(model, **options):
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    return mkor.MKOR(model, base, **options)


def backward(model):
    model(torch.ones(6, 4, dtype=torch.float64)).square().mean().backward()


def end(folder, rank, result):
    """Leave a result, and then at once: the others may be gone."""
    torch.save(result, os.path.join(folder, f"result-{rank}.pt"))
    os._exit(0)


def come_after(folder, other):
    """Wait until another worker has left, and end."""
    start = time.monotonic()
    while time.monotonic() < start + 10 * LIMIT:
        time.sleep(0.1)
        if os.path.exists(os.path.join(folder, f"result-{other}.pt")):
            break
    end(folder, 1 - other, None)


def told(function):
    """The message of an error, the kind of its cause, and the seconds that it took."""
    start = time.monotonic()
    try:
        function()
    except RuntimeError as error:
        return str(error), type(error.__cause__).__name__, time.monotonic() - start
    raise AssertionError("no error")


def begin_anew(folder, rank, workers):
    """The same workers with a time limit of a few seconds."""
    dist.barrier()  # or one closes connections that the other is still making
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/anew",
        rank=rank,
        world_size=workers,
        timeout=datetime.timedelta(seconds=LIMIT),
    )


def dies(rank, folder):
    """Worker 1 ends before its second step."""
    model = net()
    optimizer = build(model, factor_update_steps=1)
    backward(model)
    optimizer.step()
    backward(model)
    if rank == 1:
        end(folder, rank, None)
    end(folder, rank, told(optimizer.step))


def test_a_worker_that_ends(tmp_path):
    first, _, third = spawn(dies, tmp_path, str(tmp_path), workers=3)
    assert first[:2] == third[:2]
    assert first[0].startswith("workers could not add up the statistics of a step: at least one of")
    assert (
        "start all again from the last checkpoint; if one is only slow, pass a longer" in first[0]
    )
    assert max(first[2], third[2]) < 30


def sleeps(rank, folder):
    """Worker 1 comes too late; gradients are gathered in a step without an update."""
    begin_anew(folder, rank, 2)
    model = fully_shard(net())
    warnings.simplefilter("ignore")
    optimizer = build(model, factor_update_steps=100, warmup_steps=1)
    backward(model)
    optimizer.step()
    backward(model)
    if rank == 1:
        come_after(folder, 0)
    end(folder, rank, told(optimizer.step))


def test_a_worker_that_does_not_come(tmp_path):
    message, cause, seconds = spawn(sleeps, tmp_path, str(tmp_path))[0]
    assert message.startswith("workers could not exchange what preconditions the gradients of a")
    assert cause != "NoneType"
    assert LIMIT / 2 < seconds < 3 * LIMIT


def saves_alone(rank, folder):
    """The state of layers that others hold, asked for by one worker."""
    begin_anew(folder, rank, 2)
    model = net()
    optimizer = build(model, grad_worker_fraction=0.5)
    backward(model)
    optimizer.step()
    if rank == 0:
        end(folder, rank, told(optimizer.state_dict))
    come_after(folder, 0)


def test_a_worker_that_saves_alone(tmp_path):
    message, _, seconds = spawn(saves_alone, tmp_path, str(tmp_path))[0]
    told = "workers could not gather the factors for state_dict(), which all workers must call"
    assert message.startswith(told)
    assert seconds < 3 * LIMIT


def test_a_worker_that_is_out_of_memory_says_so():
    @guarded
    def collective():
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        collective()
