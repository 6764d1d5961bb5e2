"""Which runs find an optimizer's learning rate and options: pure functions on losses.

The learning rates are the same for all, 1 and 3 times powers of ten: a common grid at first, then
further ones as long as the best lies at its edge. Options that a candidate asks to be searched are
then tried one after the other, each value at the best rate so far and at its two neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LOWEST, HIGHEST = -14, 4
"""The last learning rates that are tried, 1e-7 and 100."""

Point = tuple[str, float]
"""An optimizer's name, which may carry options, and a learning rate."""

LossOf = Callable[[str, float], "float | None"]
"""The final loss at a point; infinite where it diverged, None where it is not known yet."""


@dataclass(frozen=True)
class Candidate:
    """An optimizer to be tuned.

    Attributes:
        name: Its name, which may carry options.
        search: Values to try for options, in the order in which they are tried.
    """

    name: str
    search: Mapping[str, Sequence[Any]] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Tuning:
    """How far the tuning of a candidate is.

    Attributes:
        points: All points that were needed so far.
        missing: Those of them whose losses are needed next; none when it is done.
        best: The point with the lowest loss; None while some are missing, and where all diverged.
    """

    points: tuple[Point, ...]
    missing: tuple[Point, ...]
    best: Point | None


def rate(place: int) -> float:
    """Returns a learning rate of the common grid: 0 is 1, 1 is 3, 2 is 10, -1 is 0.3."""
    return float(f"{(1, 3)[place % 2]}e{place // 2}")


def place(lr: float) -> int | None:
    """Returns the place of a learning rate on the common grid, None where it is not on it."""
    found = round(2 * math.log10(lr))
    return found if rate(found) == lr else None


def tune(candidate: Candidate, grid: Sequence[int], loss_of: LossOf) -> Tuning:
    """Finds the best learning rate and options of a candidate, as far as losses are known.

    Args:
        candidate: What to tune.
        grid: The places of the first rates, as :func:`rate` counts them.
        loss_of: The losses that are known.

    Returns:
        What is missing, or the best point.
    """
    search = _Search(loss_of)
    name = candidate.name
    place = search.best_rate(name, grid)
    for option, values in candidate.search.items():
        if place is None:
            break
        near = (place - 1, place, place + 1)
        names = [name, *(f"{name}:{option}={value}" for value in values)]
        tried = {other: search.best_rate(other, near) for other in names}
        if search.missing:
            break
        name = min(tried, key=lambda other: search.loss(other, tried[other]))
        place = tried[name]
    best = None if search.missing or place is None else (name, rate(place))
    return Tuning(tuple(search.points), tuple(search.missing), best)


class _Search:
    def __init__(self, loss_of: LossOf) -> None:
        self._loss_of = loss_of
        self.points: dict[Point, None] = {}
        self.missing: dict[Point, None] = {}

    def loss(self, name: str, place: int | None) -> float:
        """Returns a loss, infinite where it is missing."""
        if place is None:
            return math.inf
        point = (name, rate(place))
        self.points[point] = None
        known = self._loss_of(*point)
        if known is None:
            self.missing[point] = None
            return math.inf
        return known

    def best_rate(self, name: str, first: Sequence[int]) -> int | None:
        """Returns the place of the best rate; None where one is missing or all diverge."""
        places = list(first)
        while True:
            losses = {place: self.loss(name, place) for place in places}
            if any((name, rate(place)) in self.missing for place in places):
                return None
            best = min(places, key=lambda place: losses[place])
            diverged = math.isinf(losses[best])
            further = self._further(places, best, diverged)
            if further is None:
                return None if diverged else best
            places.append(further)

    def _further(self, places: Sequence[int], best: int, diverged: bool) -> int | None:
        """Returns the next rate to try, None where the best one has neighbours on both sides."""
        low, high = min(places), max(places)
        if (diverged or best == low) and low > LOWEST:
            return low - 1
        if not diverged and best == high and high < HIGHEST:
            return high + 1
        return None
