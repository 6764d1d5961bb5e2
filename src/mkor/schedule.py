"""When to update the factors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UpdateSchedule:
    """Factors are updated in the first `warmup` steps and then in every `every`-th step.

    Attributes:
        every: The paper's f, in optimizer steps.
        warmup: Number of steps at the start that all update.
    """

    every: int
    warmup: int

    def due(self, step: int) -> bool:
        """Whether step number `step` (from 0) updates the factors."""
        return step < self.warmup or step % self.every == 0
