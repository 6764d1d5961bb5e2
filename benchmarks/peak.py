"""Peak memory of a step: parameters, optimizer state and everything that the step allocates."""

from __future__ import annotations

from collections.abc import Callable
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
