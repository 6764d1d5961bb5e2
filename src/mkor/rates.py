"""Learning rates of parameter groups, numbers or tensors: lowered, set and copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mkor.checks import is_number, require

Rate = float | Tensor
"""A learning rate, as torch's groups hold them."""


def single(scheduler: LRScheduler | None) -> list[LRScheduler]:
    """A scheduler, or those that it holds, as SequentialLR and ChainedScheduler do."""
    held = getattr(scheduler, "_schedulers", None)
    if held is not None:
        return [inner for one in held for inner in single(one)]
    return [] if scheduler is None else [scheduler]


def floors(floor: float | Sequence[float], groups: int) -> list[float]:
    """The least rate of each group."""
    each = [floor] * groups if isinstance(floor, (int, float)) else list(floor)
    for value in each:
        least = is_number(value) and value >= 0
        require("floor", value, least, "at least 0 and finite, or a list of such")
    if len(each) != groups:
        raise ValueError(
            f"floor={floor!r} has {len(each)} values for {groups} parameter groups: pass a single "
            "number or one for each group"
        )
    return each


def lowered(rate: Rate, factor: float, floor: float) -> Rate:
    """The rate times the factor, but not below the floor; a rate below it stays."""
    if isinstance(rate, Tensor):
        return torch.minimum(rate, (rate * factor).clamp_min(floor))
    return min(rate, max(rate * factor, floor))


@torch.no_grad()
def set_rate(group: dict[str, Any], rate: Rate) -> None:
    """Set a group's rate; in place where it is a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def copies(optimizer: Optimizer, key: str = "lr") -> list[Rate]:
    """The rates of the groups; tensors are copied."""
    rates = [group[key] for group in optimizer.param_groups]
    return [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
