"""What tuned optimizers reached on a task, relative to the best first-order one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from mkor_bench.optimizers import optimizer_row
from mkor_bench.summary import OptimizerResult, TaskResult


@dataclass(frozen=True)
class TaskOutcome:
    """Every tuned optimizer on one task.

    Attributes:
        result: The runs.
        chosen: By an optimizer's name, the name with the options that tuning chose.
    """

    result: TaskResult
    chosen: Mapping[str, str]

    @property
    def name(self) -> str:
        """The task's name."""
        return self.result.task.name

    def of(self, optimizer: str) -> OptimizerResult | None:
        """Returns the result of an optimizer, None where it has none."""
        found = [result for result in self.result.optimizers if result.optimizer == optimizer]
        return found[0] if found else None

    def steps_to_target(self, result: OptimizerResult) -> int | None:
        """Returns the steps to the best first-order final loss, None if it is not reached."""
        reached = self.result.reach(result)
        return None if reached is None else reached[0]

    def seconds_to_target(self, result: OptimizerResult) -> float | None:
        """Returns the time of those steps.

        Args:
            result: One of this task's.

        Returns:
            The steps times SGD's seconds a step times the measured ratio of step times, which
            other programs on the machine disturb least; None if any of them is not known.
        """
        steps = self.steps_to_target(result)
        if steps is None or math.isnan(result.step_time_ratio):
            return None
        return steps * result.step_time_ratio * self.sgd_step_seconds

    @property
    def sgd_step_seconds(self) -> float:
        """The time of an SGD step: the median of what was measured beside each optimizer."""
        times = [
            result.step_seconds / result.step_time_ratio
            for result in self.result.optimizers
            if not math.isnan(result.step_time_ratio)
        ]
        return statistics.median(times) if times else math.nan

    def step_gain(self, result: OptimizerResult) -> float:
        """Returns how many times fewer steps it takes than the best first-order optimizer.

        Args:
            result: One of this task's.

        Returns:
            0 if it does not reach that optimizer's final loss, NaN if there is no target.
        """
        target = self.result.target
        own = None if target is None else self.steps_to_target(target)
        if own is None:
            return math.nan
        steps = self.steps_to_target(result)
        return 0.0 if steps is None else own / steps

    def time_gain(self, result: OptimizerResult) -> float:
        """Returns how many times less time it takes, as :meth:`step_gain` does for steps."""
        target = self.result.target
        own = None if target is None else self.seconds_to_target(target)
        if own is None:
            return math.nan
        if self.steps_to_target(result) is None:
            return 0.0
        seconds = self.seconds_to_target(result)
        return math.nan if seconds is None else own / seconds

    def behind_base(self, result: OptimizerResult) -> bool:
        """Tells whether an optimizer ends above its base by more than their seeds spread."""
        name = optimizer_row(result.optimizer).base
        base = None if name is None else self.of(name)
        if base is None:
            return False
        (loss, spread), (floor, other) = result.final_loss, base.final_loss
        if not math.isfinite(loss):
            return math.isfinite(floor)
        return loss - floor > max(spread, other)


def median(values: list[float]) -> float:
    """Returns the median of the numbers that are known, NaN if there are none."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan
