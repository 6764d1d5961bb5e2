"""Peak memory of a step: parameters, optimizer state and everything that the step allocates."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(step: Callable[[], Any], held: int) -> int:
    """The most bytes held at a time during one step.

    Args:
        step: Runs the step.
        held: Bytes held before it: parameters and state.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    events = prof.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = peak = held
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


def state_bytes(optimizer: Any) -> int:
    """Bytes of parameters, of the base's state and of curvature."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = [t for state in optimizer.state.values() for t in state.values()]
    own = sum(t.numel() * t.element_size() for t in parameters + tensors if torch.is_tensor(t))
    layers = optimizer.layers() if hasattr(optimizer, "layers") else []
    return own + sum(info.bytes for info in layers)


def resident_bytes(work: Callable[..., Any], *arguments: Any) -> int:
    """The largest resident size of a new process that does some work, the interpreter's included.

    Args:
        work: At the top of a module.
        arguments: Anything that pickles.
    """
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(largest_resident, (work, arguments))


def largest_resident(work: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    """Do the work; the largest resident size of this process so far, in bytes."""
    work(*arguments)
    # Not ru_maxrss, which a new process takes over from the one that started it.
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
