"""Means of what training shows a step, read from the device once a window.

A value may be a tensor that the device has yet to compute. Values are added up where they lie, and
the host waits for them only when the mean is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from mkor.distributed import comm

FIELDS = ("total", "finite", "calls")
"""What a meter holds."""


class Meter:
    """The mean of the finite values since it was taken last, over all workers."""

    def __init__(self, name: str) -> None:
        """Empty; `name` is what messages call a value."""
        self.name = name
        self.clear()

    def clear(self) -> None:
        """Forget every value."""
        self.total: Tensor | float = 0.0
        self.finite: Tensor | float = 0.0
        self.calls = 0

    def add(self, value: SupportsFloat) -> None:
        """Add a number or a tensor of one element, which is not waited for.

        Raises:
            TypeError: The value is not a number.
            ValueError: The value is a tensor of several elements.
        """
        total, finite = parts(self.name, value)
        self.total, self.finite = self.total + total, self.finite + finite
        self.calls += 1

    def take(self, device: torch.device | None) -> float | None:
        """The mean, and start anew; None where no worker has a finite value.

        Args:
            device: Where workers exchange their sums.
        """
        sums = [float(self.total), float(self.finite)]
        self.clear()
        if comm.world_size() > 1:
            pair = torch.tensor(sums, dtype=torch.float64, device=device)
            sums = comm.all_reduce_sum(pair).tolist()
        return sums[0] / sums[1] if sums[1] else None

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, which waits for the device."""
        return {"total": float(self.total), "finite": float(self.finite), "calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        for key in FIELDS:
            setattr(self, key, state[key])


def parts(name: str, value: SupportsFloat) -> tuple[Tensor | float, Tensor | float]:
    """A value and 1, or twice 0 where it isn't finite."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}: pass a single number, such as its mean"
            )
        scalar = value.detach().reshape(())
        wide = scalar.to(torch.promote_types(scalar.dtype, torch.float32))
        return torch.nan_to_num(wide, 0.0, 0.0, 0.0), torch.isfinite(wide).to(wide.dtype)
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        kind = type(value).__name__
        raise TypeError(f"{name} must be a number or a tensor of one, got {kind}") from error
    return (number, 1.0) if math.isfinite(number) else (0.0, 0.0)


def device_of(parameters: Iterable[Tensor]) -> torch.device | None:
    """Where the first parameter lies."""
    first = next(iter(parameters), None)
    return None if first is None else first.device
