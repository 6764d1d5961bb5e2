"""A task that takes a millisecond a step and draws from every kind of randomness."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from mkor_bench.tasks.task import Task

STEPS = 20


def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(16, 4, generator=generator)


def build(seed):
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))


def loss(model, rows):
    noise = 0.01 * (random.random() + np.random.rand())
    return (model(rows) - rows.sum(1, keepdim=True) - noise).square().mean()


def evaluate(model):
    rows = next(batches(12345))
    return (model(rows) - rows.sum(1, keepdim=True)).square().mean().item()


def make(loss_function=loss, **changes):
    fields = {
        "name": "tiny",
        "description": "learns to add four numbers",
        "build": build,
        "batches": batches,
        "loss": loss_function,
        "evaluate": evaluate,
        "metric": "test error",
        "higher_is_better": False,
        "steps": STEPS,
        "lrs": (0.01, 0.1),
    }
    return Task(**{**fields, **changes})


def task():
    return make()


def flat():
    """A loss of 1, whatever the weights are."""
    return make(lambda model, rows: (0 * model(rows)).square().mean() + 1)


def killed():
    """Ends the process without warning at call KILLED_AT of the loss."""
    return make(_at_call("KILLED_AT", lambda: os._exit(9)))


def counted():
    """Adds a byte to the file CALLS at each call of the loss, and is long enough to be killed."""

    def loss_function(model, rows):
        with open(os.environ["CALLS"], "ab", buffering=0) as calls:
            calls.write(b".")
        return loss(model, rows)

    return make(loss_function, steps=150)


def interrupted():
    """Sends Ctrl-C to the process at call INTERRUPTED_AT of the loss."""
    return make(_at_call("INTERRUPTED_AT", lambda: os.kill(os.getpid(), signal.SIGINT)))


def crashing():
    """Raises at call CRASHES_AT of the loss."""
    return make(_at_call("CRASHES_AT", _crash))


def stuck():
    """Notes its process in the folder PIDS in a worker, and never comes to an end there."""

    def loss_function(model, rows):
        if multiprocessing.parent_process() is not None:
            Path(os.environ["PIDS"], str(os.getpid())).touch()
            time.sleep(1000)
        return loss(model, rows)

    return make(loss_function)


def with_data(data):
    """Takes the data folder."""
    return make(description=f"data in {data}")


def _crash():
    raise RuntimeError("out of luck")


def _at_call(variable, act):
    calls = 0

    def counting(model, rows):
        nonlocal calls
        calls += 1
        if calls == int(os.environ.get(variable, "0")):
            act()
        return loss(model, rows)

    return counting
