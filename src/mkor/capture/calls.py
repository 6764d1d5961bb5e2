"""One call of a module: its input tensors, and whether it belongs to training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def transformed() -> bool:
    """Whether the call belongs to a functional transform, a trace or an export, not to training."""
    if torch._C._functorch.maybe_current_level() is not None:
        return True
    exporting = getattr(torch.compiler, "is_exporting", lambda: False)()
    return bool(exporting) or torch._C._get_tracing_state() is not None


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """The input tensors of a call: query, key and value of an attention, else the first one."""
    if "query" in kwargs or "key" in kwargs or "value" in kwargs:
        args = (*args, *(kwargs[name] for name in ("query", "key", "value") if name in kwargs))
        return args[:3]
    return tuple(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
