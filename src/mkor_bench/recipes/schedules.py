"""Learning rates over the steps: what a file says of them, and the factors that come of it."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mkor_bench.recipes.fields import Fields

SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "constant": (),
    "cosine": (),
    "polynomial": ("power",),
    "milestones": ("milestones", "factor"),
    "knee": ("window", "dwell", "beta", "factor"),
}
"""Kinds of schedules, and what each needs besides ``warmup``."""

UNITS = ("steps", "epochs", "shares")
"""What times are counted in; a share is that of the whole run, from 0 to 1."""

_REAL = ("power", "factor", "beta")


@dataclass(frozen=True)
class Schedule:
    """How the learning rate goes.

    Attributes:
        kind: One of :data:`SCHEDULES`.
        warmup: Steps in which it grows to its value.
        options: What the kind needs; times in steps.
    """

    kind: str
    warmup: int
    options: Mapping[str, Any]


class Span(NamedTuple):
    """How long a training is.

    Attributes:
        steps: Steps in all.
        epoch: Steps of an epoch, which need not be whole; None where the recipe doesn't tell.
    """

    steps: int
    epoch: float | None


def read_schedule(where: str, table: Mapping[str, Any], span: Span, lr: float) -> Schedule:
    """Reads the table of a schedule.

    Args:
        where: The file and the table, for messages.
        table: The table.
        span: How long the training is.
        lr: The learning rate.

    Returns:
        The schedule, in steps.

    Raises:
        UserError: Something in it is missing, unknown or out of range.
    """
    every = dict.fromkeys(key for keys in SCHEDULES.values() for key in keys)
    fields = Fields(where, table, ("kind", "unit", "warmup", *every))
    kind = fields.choice("kind", tuple(SCHEDULES))
    fields.only(("kind", "unit", "warmup", *SCHEDULES[kind]), f"kind {kind!r}")
    clock = _Clock(fields, span)
    warmup = clock.warmup()
    options = {key: _of_a_kind(fields, key, clock) for key in SCHEDULES[kind]}
    if kind == "milestones":
        if options["milestones"] and options["milestones"][0] < warmup:
            rule = f"none within the warm-up, the first {warmup} steps"
            raise fields.wrong("milestones", table["milestones"], rule)
        times, factor = len(options["milestones"]), options["factor"]
        if math.log(lr) + times * math.log(factor) > math.log(sys.float_info.max):
            raise fields.wrong("factor", factor, f"less, for a finite rate after {times} of them")
    return Schedule(kind, warmup, options)


class _Clock:
    """Turns times of a table into steps of a training."""

    def __init__(self, fields: Fields, span: Span) -> None:
        self._fields, self._steps = fields, span.steps
        self._unit = fields.choice("unit", UNITS, default="steps")
        if self._unit == "epochs" and span.epoch is None:
            raise fields.wrong("unit", self._unit, "steps or shares where the recipe has no epoch")
        sizes = {"steps": 1, "epochs": span.epoch or 1, "shares": span.steps}
        self._size = sizes[self._unit]
        self._below = f"below {span.steps / self._size:g}"

    def warmup(self) -> int:
        """Takes the steps before the rate has its value."""
        if self._unit == "steps":
            found = self._fields.whole("warmup", 0, default=0)
        else:
            rule = f"a number of {self._unit} of at least 0"
            found = self._fields.number("warmup", rule, least=0, default=0)
        if not self._within(found):
            raise self._fields.wrong("warmup", found, f"{self._unit} {self._below}")
        return round(found * self._size)

    def milestones(self) -> list[int]:
        """Takes the steps at which the rate changes."""
        rule = f"{self._unit} {self._below} in ascending order"
        found = self._fields.take("milestones", list, f"a list of {rule}")
        kinds = (int,) if self._unit == "steps" else (int, float)
        inside = all(type(time) in kinds and time > 0 and self._within(time) for time in found)
        steps = [round(time * self._size) for time in found] if inside else []
        if not inside or 0 in steps or steps != sorted(set(steps)):
            raise self._fields.wrong("milestones", found, rule)
        return steps

    def _within(self, time: float) -> bool:
        """Whether a time is within the training, before and after it is rounded to steps."""
        return time < self._steps / self._size and round(time * self._size) < self._steps


def _of_a_kind(fields: Fields, key: str, clock: _Clock) -> Any:
    if key == "milestones":
        return clock.milestones()
    return fields.positive(key) if key in _REAL else fields.whole(key, 1)


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
