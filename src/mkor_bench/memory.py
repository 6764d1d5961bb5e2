"""Memory of a step: what is held before it, and the most that is held during it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def held_bytes(optimizer: Any) -> int:
    """Returns the bytes of weights, of the base's state, of factors and of momentum.

    Args:
        optimizer: A torch optimizer, one of ours or another.
    """
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    found = {id(t): t for t in (*weights, *_tensors(optimizer.state_dict()))}
    return sum(t.numel() * t.element_size() for t in found.values())


def _tensors(content: Any) -> Iterator[Tensor]:
    """The tensors in a state dict, whoever of several optimizers keeps them."""
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, dict):
        for part in content.values():
            yield from _tensors(part)
    elif isinstance(content, (list, tuple)):
        for part in content:
            yield from _tensors(part)


def factor_bytes(optimizer: Any) -> int:
    """Returns the bytes of factors, of which other optimizers have none."""
    layers = getattr(optimizer, "layers", list)
    return sum(info.bytes for info in layers())


def peak_bytes(step: Callable[[], Any], held: int) -> int:
    """Returns the most bytes held at a time during a step.

    Args:
        step: Runs the step.
        held: Bytes held before it, which a profile of the CPU does not see.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated()
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it tells that it starts and stops
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events = found.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = peak = held
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak
