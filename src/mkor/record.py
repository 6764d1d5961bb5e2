"""What the engine knows of one layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mkor.methods.base import State
from mkor.momentum import Buffers


@dataclass
class Record:
    """What the engine knows of one layer.

    Attributes:
        state: The method's tensors; empty before the first update.
        updates: Number of updates so far.
        last_update: Step of the last one, or None.
        momentum: Moving averages of the gradients; empty unless they are kept.
        followed: The state that was last seen to follow its weight, to that device and dtype.
    """

    state: State = field(default_factory=dict)
    updates: int = 0
    last_update: int | None = None
    momentum: Buffers = field(default_factory=dict)
    followed: tuple[State, torch.device, torch.dtype] | None = None

    def follow(self, weight: Tensor, wanted: Callable[[torch.dtype, str], torch.dtype]) -> State:
        """The state on a weight's device, its numbers in the dtypes that go with the weight's.

        Args:
            weight: The layer's.
            wanted: The dtype of a tensor, by the weight's dtype and the tensor's key.
        """
        known, place = self.followed, (weight.device, weight.dtype)
        if known is not None and known[0] is self.state and known[1:] == place:
            return self.state
        for key, tensor in self.state.items():
            floating = tensor.is_floating_point()
            dtype = wanted(weight.dtype, key) if floating else tensor.dtype
            if tensor.device != weight.device or tensor.dtype != dtype:
                self.state[key] = tensor.to(weight.device, dtype)
        self.followed = self.state, *place
        return self.state
