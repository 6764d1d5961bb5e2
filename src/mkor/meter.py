"""Means of what training shows a step, read from the device once a window, and its time.

A value may be a tensor that the device has yet to compute. Values are added up where they lie, and
the host waits for them only when the mean is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from mkor.distributed import comm

DOUBLE = ("cpu", "cuda")
"""Devices that add as widely as Python: there a sum goes on after a checkpoint to the last bit."""

FIELDS = ("total", "finite", "calls")
"""What a meter holds."""


class Meter:
    """The mean of the sound values since it was taken last, over all workers.

    Attributes:
        left_out: Values of this worker that the last mean lacks, since they weren't sound.
    """

    def __init__(self, name: str, least: float | None = None) -> None:
        """Empty.

        Args:
            name: What messages call a value.
            least: The least sound value. Numbers that are not sound are then refused; tensors are
                left out, since nothing waits for them. None takes every finite value as sound and
                refuses nothing.
        """
        self.name = name
        self.least = least
        self.left_out = 0
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
            ValueError: The value is a tensor of several elements, or a number that is refused.
        """
        total, finite = parts(self.name, value, self.least)
        self.total, self.finite = self.total + total, self.finite + finite
        self.calls += 1

    def absorb(self, other: Meter) -> None:
        """Add what another one was shown, and empty it."""
        for key in FIELDS:
            setattr(self, key, getattr(self, key) + getattr(other, key))
        other.clear()

    def take(self, device: torch.device | None) -> float | None:
        """The mean, and start anew; None where no worker has a sound value.

        Args:
            device: Where workers exchange their sums.
        """
        sums = [float(self.total), float(self.finite)]
        self.left_out = self.calls - int(sums[1])
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


def parts(
    name: str, value: SupportsFloat, least: float | None
) -> tuple[Tensor | float, Tensor | float]:
    """A value and 1, or twice 0 where it isn't sound."""
    if isinstance(value, Tensor):
        return tensor_parts(name, value, least)
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        kind = type(value).__name__
        raise TypeError(f"{name} must be a number or a tensor of one, got {kind}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    sound = math.isfinite(number) and (least is None or number >= least)
    if least is not None and not sound:
        raise ValueError(
            f"{name} is {number}: it must be finite and at least {least:g}; show only such values, "
            "if need be with a constant added to all of them"
        )
    return (number, 1.0) if sound else (0.0, 0.0)


def tensor_parts(name: str, value: Tensor, least: float | None) -> tuple[Tensor, Tensor]:
    """The same of a tensor, which is not waited for."""
    if value.is_complex():
        raise TypeError(f"{name} must be a number or a tensor of one, got {value.dtype}")
    if value.numel() != 1:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}: pass a single number, such as its mean"
        )
    scalar = value.detach().reshape(())
    wide = scalar.to(torch.float64 if scalar.device.type in DOUBLE else torch.float32)
    sound = torch.isfinite(wide)
    if least is not None:
        sound = sound & (wide >= least)
    return torch.where(sound, wide, 0.0), sound.to(wide.dtype)


class Stopwatch:
    """Seconds since it was started, which copies and checkpoints take along."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Started; `clock` returns seconds."""
        self.clock = clock
        self.start()

    def start(self, seconds: float = 0.0) -> None:
        """Begin, with so many seconds past."""
        self.begin = self.clock() - seconds

    def seconds(self) -> float:
        """Seconds since the start."""
        return self.clock() - self.begin

    def __getstate__(self) -> dict[str, Any]:
        """The clock and its seconds: another process counts from another moment."""
        return {"clock": self.clock, "seconds": self.seconds()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Go on counting."""
        self.clock = state["clock"]
        self.start(state["seconds"])


def device_of(parameters: Iterable[Tensor]) -> torch.device | None:
    """Where the first parameter lies."""
    first = next(iter(parameters), None)
    return None if first is None else first.device
