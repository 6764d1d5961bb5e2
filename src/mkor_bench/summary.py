"""What is read off the curves: pure functions on lists of numbers.

The loss of a single batch is noisy, so a *final loss* is the mean over the last
twentieth of the steps, and a run *reaches* a loss when the mean over a window of that
length does. The same window in both makes the best first-order optimizer reach its own
final loss at its last step at the latest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mkor_bench.optimizers import optimizer_row
from mkor_bench.tasks.task import Task
from mkor_bench.train import Run

WINDOW_SHARE = 1 / 20
"""The share of the steps that a loss is averaged over."""


def window(steps: int) -> int:
    """Returns the number of steps that a loss is averaged over."""
    return max(1, round(WINDOW_SHARE * steps))


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Averages each value with those before it.

    Args:
        values: A curve.
        width: How many values to average; the first ones have fewer before them.

    Returns:
        A curve of the same length.
    """
    # Not by differences of running sums: one huge early loss would swallow the later ones.
    sums = np.convolve(values, np.ones(width))[: len(values)]
    counts = np.minimum(np.arange(1, len(values) + 1), width)
    return [float(mean) for mean in sums / counts]


def final_loss(run: Run) -> float:
    """Returns the mean loss of a run's last steps, infinity if it diverged."""
    if run.diverged or not run.losses:
        return math.inf
    return statistics.fmean(run.losses[-window(run.settings.steps) :])


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Averages over seeds.

    Args:
        values: One value a seed.

    Returns:
        Mean and sample standard deviation: (inf, nan) if any value is infinite,
        a spread of 0 for a single value.
    """
    if not all(math.isfinite(value) for value in values):
        return math.inf, math.nan
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return statistics.fmean(values), spread


def mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    """Averages the curves of several seeds, as far as the shortest goes."""
    return [statistics.fmean(column) for column in zip(*curves, strict=False)]


@dataclass
class OptimizerResult:
    """One optimizer on one task.

    Attributes:
        optimizer: Its name.
        grid: The final loss of the tuning run at each learning rate.
        finalists: One run a seed at each of the best learning rates of the grid.
        step_seconds: The median time of a step in the interleaved measurement.
        step_time_ratio: The time of a step relative to SGD's.
    """

    optimizer: str
    grid: dict[float, float]
    finalists: dict[float, list[Run]] = field(default_factory=dict)
    step_seconds: float = math.nan
    step_time_ratio: float = math.nan

    @property
    def lr(self) -> float | None:
        """The finalist with the lowest mean final loss, None if all of the grid diverged."""
        return min(self.finalists, key=lambda lr: self.final_loss_at(lr)[0], default=None)

    @property
    def runs(self) -> list[Run]:
        """One run a seed at that learning rate."""
        return [] if self.lr is None else self.finalists[self.lr]

    @property
    def lr_at_edge(self) -> bool:
        """Whether a wider grid might have had a better learning rate."""
        return len(self.grid) > 1 and self.lr in (min(self.grid), max(self.grid))

    @property
    def final_loss(self) -> tuple[float, float]:
        """Mean and spread of the final loss over seeds, infinite if a seed diverged."""
        return (math.inf, math.nan) if self.lr is None else self.final_loss_at(self.lr)

    def final_loss_at(self, lr: float) -> tuple[float, float]:
        """Returns the same for any finalist."""
        return mean_and_spread([final_loss(run) for run in self.finalists[lr]])

    def best_of_grid(self, count: int) -> list[float]:
        """Returns the learning rates with the lowest losses of those that did not diverge."""
        finite = [lr for lr, loss in self.grid.items() if math.isfinite(loss)]
        return sorted(finite, key=lambda lr: self.grid[lr])[:count]

    @property
    def metric(self) -> tuple[float, float]:
        """Mean and spread of the test metric over the seeds that did not diverge."""
        metrics = [run.metric for run in self.runs if run.metric is not None]
        return mean_and_spread(metrics) if metrics else (math.nan, math.nan)

    def reach(self, target: float) -> tuple[int, float] | None:
        """Tells when the mean curve gets down to a loss.

        Args:
            target: The loss.

        Returns:
            Steps and mean training seconds until then, None if it never does.
        """
        if not self.runs:
            return None
        width = window(self.runs[0].settings.steps)
        losses = smooth(mean_curve([run.losses for run in self.runs]), width)
        seconds = mean_curve([run.seconds for run in self.runs])
        # Rounding of sums must not keep an optimizer from its own final loss.
        slack = abs(target) * 1e-9
        for index in range(width - 1, len(losses)):
            if losses[index] <= target + slack:
                return index + 1, seconds[index]
        return None


@dataclass
class TaskResult:
    """Every optimizer on one task.

    Attributes:
        task: The task.
        steps: The steps of each run.
        optimizers: One result for each, in the order that was asked for.
    """

    task: Task
    steps: int
    optimizers: list[OptimizerResult]

    @property
    def target(self) -> OptimizerResult | None:
        """The first-order optimizer with the lowest final loss, if any has a finite one."""
        finite = [
            result
            for result in self.optimizers
            if optimizer_row(result.optimizer).first_order and math.isfinite(result.final_loss[0])
        ]
        return min(finite, key=lambda result: result.final_loss[0], default=None)

    def reach(self, result: OptimizerResult) -> tuple[int, float] | None:
        """Tells when an optimizer gets down to the best first-order final loss.

        Args:
            result: One of this task's results.

        Returns:
            Steps and mean training seconds, None if it does not or there is no target.
        """
        target = self.target
        return None if target is None else result.reach(target.final_loss[0])
