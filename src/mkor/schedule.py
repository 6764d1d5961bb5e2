"""When to update the factors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class UpdateSchedule:
    """Factors are updated in the first `warmup` steps and then in every `every`-th step.

    Attributes:
        every: The paper's f, in optimizer steps; a number or a function of the step.
        warmup: Number of steps at the start that all update.
    """

    every: int | Callable[[int], int]
    warmup: int

    def due(self, step: int) -> bool:
        """Whether step number `step` (from 0) updates the factors."""
        every = self.every(step) if callable(self.every) else self.every
        return step < self.warmup or step % every == 0
