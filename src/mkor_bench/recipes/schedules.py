"""Learning rates over the steps, as factors on the recipe's learning rate."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable

from mkor_bench.recipes.recipe import Schedule


def factor_of(schedule: Schedule, steps: int) -> Callable[[int], float]:
    """Returns what the learning rate is multiplied by at each step.

    All kinds begin with a linear warm-up. After it "constant" and "knee" stay at 1 (the knee-point
    scheduler lowers the rate itself), "cosine" goes to 0 along half a cosine, "polynomial" as
    (1 − t)^power over the share t of the whole run, and "milestones" multiplies by a factor at
    certain steps.

    Args:
        schedule: The schedule.
        steps: Of the whole run.

    Returns:
        The factor at each step, counted from 0.
    """
    falls = _after_warmup(schedule, steps)
    warmup = schedule.warmup

    def factor(step: int) -> float:
        return (step + 1) / warmup if step < warmup else falls(min(step, steps))

    return factor


def _after_warmup(schedule: Schedule, steps: int) -> Callable[[int], float]:
    options, warmup = schedule.options, schedule.warmup
    if schedule.kind == "cosine":
        return lambda step: 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
    if schedule.kind == "polynomial":
        return lambda step: float((1 - step / steps) ** options["power"])
    if schedule.kind == "milestones":
        return lambda step: float(options["factor"] ** bisect_right(options["milestones"], step))
    return lambda step: 1.0
