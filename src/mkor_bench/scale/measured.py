"""What processes of this machine can do, and what the α-β model makes of it for a small network."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import mkor
from mkor_bench.scale.model import Machine, predict

LARGE = 2**21
"""Numbers of the all-reduce that bandwidth is measured by."""

PRODUCTS, REDUCTIONS = 100, 20
"""How many of each are timed."""


def network(width: int, depth: int) -> nn.Sequential:
    """Returns equal layers, so that any number of workers can divide them."""
    parts = [(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*(module for part in parts for module in part))


def measured_machine(workers: int, width: int, rows: int) -> Machine:
    """Measures products while all processes multiply, and all-reduces.

    Processes that share cores share the rate as well. They take turns there for longer than a
    product takes, so that only the mean over many tells.

    Args:
        workers: Processes, of which this is one.
        width: Of the network.
        rows: Of a batch.
    """
    inputs, weight = torch.randn(rows, width), torch.randn(width, width)
    if workers > 1:
        dist.barrier()
    rate = 2 * inputs.numel() * width / mean_seconds(lambda: inputs @ weight, PRODUCTS)
    if workers == 1:
        return Machine(rate, 1e9, 0.0)
    small, large = torch.zeros(8), torch.zeros(LARGE)
    messages = 2 * (workers - 1)
    latency = mean_seconds(lambda: dist.all_reduce(small), REDUCTIONS) / messages
    spent = mean_seconds(lambda: dist.all_reduce(large), REDUCTIONS) / messages - latency
    return Machine(rate, large.numel() * 4 / workers / max(spent, 1e-9), latency)


def median_machine(found: list[Machine]) -> Machine:
    """Returns one machine for what processes measured."""
    keys = ("rate", "bandwidth", "latency")
    return Machine(*(statistics.median(getattr(own, key) for own in found) for key in keys))


def mean_seconds(function: Callable[[], Any], times: int) -> float:
    """Returns the mean wall time of a call, after a first one."""
    function()
    begin = time.perf_counter()
    for _ in range(times):
        function()
    return (time.perf_counter() - begin) / times


def median_seconds(function: Callable[[], Any], times: int) -> float:
    """Returns the median wall time of a call, for what is long beside a turn on a core."""
    spent = []
    for _ in range(times):
        begin = time.perf_counter()
        function()
        spent.append(time.perf_counter() - begin)
    return statistics.median(spent)


def predicted_seconds(
    method: tuple[Any, dict[str, Any]],
    machine: Machine,
    workers: int,
    *,
    width: int,
    depth: int,
    rows: int,
) -> float:
    """Returns a step of the network by the α-β model.

    Args:
        method: The optimizer's class, or None for SGD alone, and its options.
        machine: What the processes can do.
        workers: Processes.
        width: Of the network.
        depth: Its layers.
        rows: Of a batch.
    """
    cls, options = method
    model = network(width, depth)
    found = mkor.estimate(model, cls, rows=rows, workers=workers, **options) if cls else None
    flops = 6.0 * depth * width**2 * rows
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    return predict(machine, workers, flops, size, found).total
