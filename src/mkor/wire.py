"""What crosses workers in an update and in a step, from traces of the layers (see `tracing`).

This mirrors `synchronise` and `ownership`, which move the tensors; tests hold both to each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mkor import triangle
from mkor.capture.discover import Layer
from mkor.distributed.bucket import gathers, scale_dtype, widest
from mkor.distributed.placement import Place, assign, column_size, columns
from mkor.messages import Exchange, Owned
from mkor.methods.base import wide
from mkor.tracing import Trace

COUNT = torch.int64.itemsize
"""Bytes of a count of rows, which is gathered before them."""


@dataclass(frozen=True)
class Collective:
    """One collective operation.

    Attributes:
        kind: "sum" (an all-reduce) or "gather" (an all-gather).
        workers: How many take part.
        bytes: Size of the result on a worker.
    """

    kind: str
    workers: int
    bytes: int


Tensors = Mapping[str, Sequence[tuple[int, torch.dtype]]]
"""The numbers of entries and the dtypes of tensors that cross, by layer."""

Crossing = tuple[Collective, dict[str, int]]
"""A collective, and how much of its result belongs to each layer; the rest is padding."""


@dataclass(frozen=True)
class Division:
    """Which workers hold a layer.

    Attributes:
        workers: P.
        size: Workers that hold a layer.
        places: By layer.
    """

    workers: int
    size: int
    places: dict[str, Place]

    @classmethod
    def among(cls, workers: int, fraction: float, costs: Mapping[str, float]) -> Division:
        """As `Ownership` divides layers of these costs."""
        size = column_size(fraction, workers)
        return cls(workers, size, assign(costs, workers, size, {}))

    def busiest(self, held: Mapping[str, int], owned: Mapping[str, int]) -> int:
        """The most work of a worker, of what holders and what owners do by layer."""
        return max(self.by_worker(held, owned))

    def by_worker(self, held: Mapping[str, int], owned: Mapping[str, int]) -> list[int]:
        """The work of every worker."""
        out = [0] * self.workers
        for name, place in self.places.items():
            for worker in range(place.column * self.size, (place.column + 1) * self.size):
                out[worker] += held[name]
            out[place.owner] += owned.get(name, 0)
        return out


def update_crossings(
    traces: dict[str, Trace], division: Division, wire_dtype: torch.dtype | None
) -> list[Crossing]:
    """The collectives of an update, in order."""
    out: list[Crossing] = []
    rounds = max((len(found.messages) for found in traces.values()), default=0)
    for number in range(rounds if division.workers > 1 else 0):
        messages = {n: t.messages[number] for n, t in traces.items() if number < len(t.messages)}
        exchanges = {n: m for n, m in messages.items() if isinstance(m, Exchange)}
        owned = {n: m for n, m in messages.items() if isinstance(m, Owned)}
        out += exchange_crossings(exchanges, division.workers, wire_dtype)
        out += owned_crossings(owned, division)
    return [crossing for crossing in out if crossing[0].bytes]


def exchange_crossings(
    messages: dict[str, Exchange], workers: int, wire_dtype: torch.dtype | None
) -> list[Crossing]:
    """All layers are in one bucket, whose dtype holds what all of them send."""
    sums = {
        n: [packed(t, key in m.symmetric) for key, t in (m.sum | m.mean).items()]
        for n, m in messages.items()
    }
    rows = {n: [(t.numel(), t.dtype) for t in m.gather.values()] for n, m in messages.items()}
    counts = {n: COUNT * workers * len(tensors) for n, tensors in rows.items()}
    gathered = {n: workers * size for n, size in sizes(rows, wire_dtype).items()}
    parts = (
        ("sum", scale_sizes(sums, wire_dtype)),
        ("sum", sizes(sums, wire_dtype)),
        ("sum", scale_sizes(rows, wire_dtype)),
        ("gather", counts),
        ("gather", gathered),
    )
    return [
        (Collective(kind, workers, sum(by_layer.values())), by_layer) for kind, by_layer in parts
    ]


def owned_crossings(messages: dict[str, Owned], division: Division) -> list[Crossing]:
    """What owners send to their columns; of all columns the one that sends the most counts."""
    if division.size == 1 or not messages:
        return []
    by_column: list[Crossing] = []
    for column in sorted({division.places[name].column for name in messages}):
        own = {
            n: [packed(t, key in m.symmetric) for key, t in m.like.items()]
            for n, m in messages.items()
            if division.places[n].column == column
        }
        sources = {name: division.places[name].owner for name in own}
        members = columns(division.workers, division.size)[column]
        by_column.append(spread_from(sizes(own, None), sources, members))
    widest_one = max(by_column, key=lambda crossing: crossing[0].bytes)
    by_layer = {name: size for _, own in by_column for name, size in own.items()}
    return [(widest_one[0], by_layer)]


def step_crossings(layers: dict[str, Layer], division: Division) -> list[Crossing]:
    """The preconditioned gradients that holders send along their rows, in every step."""
    if division.size == division.workers or not layers:
        return []
    own: dict[str, list[tuple[int, torch.dtype]]] = {}
    for name, layer in layers.items():
        shape = layer.view.shape
        count = shape.stack * shape.outputs * shape.inputs
        own[name] = [(count, wide(layer.view.weight.dtype))]
    sources = {name: place.column for name, place in division.places.items()}
    members = list(range(division.workers // division.size))
    return [spread_from(sizes(own, None), sources, members)]


def spread_from(by_layer: dict[str, int], sources: dict[str, int], members: list[int]) -> Crossing:
    """What brings tensors from their sources among some workers to all of these."""
    lengths = dict.fromkeys(members, 0)
    for name, size in by_layer.items():
        lengths[sources[name]] += size
    found = list(lengths.values())
    if gathers(found):
        return Collective("gather", len(members), len(members) * max(found)), by_layer
    return Collective("sum", len(members), sum(found)), by_layer


def scale_sizes(tensors: Tensors, wire_dtype: torch.dtype | None) -> dict[str, int]:
    """Bytes of what tensors are multiplied by on the way, by layer."""
    dtypes = [dtype for own in tensors.values() for _, dtype in own]
    scaled = bool(dtypes) and (wire_dtype or widest(dtypes)) is torch.float16
    size = scale_dtype(dtypes).itemsize if scaled else 0
    return {name: size * len(own) for name, own in tensors.items()}


def packed(tensor: Tensor, symmetric: bool) -> tuple[int, torch.dtype]:
    """Numbers of a tensor on the wire, and their dtype."""
    if not symmetric:
        return tensor.numel(), tensor.dtype
    return math.prod(tensor.shape[:-2]) * triangle.length(tensor.shape[-1]), tensor.dtype


def sizes(tensors: Tensors, wire_dtype: torch.dtype | None) -> dict[str, int]:
    """Bytes of tensors by layer, in the dtype of the bucket of all."""
    dtypes = [dtype for own in tensors.values() for _, dtype in own]
    size = (wire_dtype or widest(dtypes)).itemsize if dtypes else 0
    return {name: size * sum(count for count, _ in own) for name, own in tensors.items()}
