"""Who holds a layer: pure, so that every worker finds the same answer without asking.

P workers form a grid of columns of g workers. A layer belongs to a column, whose workers hold its
state and precondition its gradient; one of them owns it and computes for the others. The workers
that have the same place in their columns form a row, in which every layer has one holder.

| KAISA | g | who preconditions a layer |
| ----- | - | ------------------------- |
| COMM-OPT | P | every worker |
| HYBRID-OPT | between | g workers, each for its row |
| MEM-OPT | 1 | its owner, for all |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a layer belongs.

    Attributes:
        column: Its column.
        owner: The worker that computes what only one must.
    """

    column: int
    owner: int


def column_size(fraction: float, workers: int) -> int:
    """Workers that hold a layer: `fraction` of all, rounded up to a divisor of their number."""
    least = math.ceil(fraction * workers - 1e-6)  # a third of three is one
    return next(size for size in range(max(least, 1), workers + 1) if workers % size == 0)


def columns(workers: int, size: int) -> list[list[int]]:
    """The workers of each column, neighbours: they exchange the most."""
    return [list(range(start, start + size)) for start in range(0, workers, size)]


def rows(workers: int, size: int) -> list[list[int]]:
    """The workers of each row, by their column."""
    return [list(range(start, workers, size)) for start in range(size)]


def assign(
    costs: Mapping[str, float], workers: int, size: int, known: Mapping[str, Place]
) -> dict[str, Place]:
    """Give each layer to the column with the least work, and in it to the least busy worker.

    The dearest layers come first (longest processing time first), which ends within 4/3 of the
    best division. Layers of the same cost are taken in the order of `costs`.

    Args:
        costs: Work that a layer makes, by name.
        workers: P.
        size: g.
        known: Layers that have a place, which they keep.
    """
    groups = columns(workers, size)
    loads = [0.0] * workers
    places = {name: known[name] for name in costs if name in known}
    for name, place in places.items():
        loads[place.owner] += costs[name]
    for name in sorted(costs.keys() - known.keys(), key=by_cost(costs)):
        column = min(range(len(groups)), key=lambda c: sum(loads[w] for w in groups[c]))
        owner = min(groups[column], key=loads.__getitem__)
        places[name] = Place(column, owner)
        loads[owner] += costs[name]
    return {name: places[name] for name in costs}


def by_cost(costs: Mapping[str, float]) -> Callable[[str], tuple[float, int]]:
    """Sorts the dearest first, equals by their order."""
    order = {name: number for number, name in enumerate(costs)}
    return lambda name: (-costs[name], order[name])
