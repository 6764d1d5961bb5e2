"""Which workers hold a layer's state, and what crosses so that the others need not.

See `distributed/placement.py` for who holds what. In a step, each worker preconditions the
gradients of its column's layers and sends them to its row, in one collective of all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from mkor import triangle
from mkor.distributed import comm
from mkor.distributed.bucket import spread_flat
from mkor.distributed.placement import Place, assign, column_size, columns, rows
from mkor.messages import Owned


class Ownership:
    """Shares the layers of a model out to workers."""

    def __init__(self, fraction: float) -> None:
        """Nothing is shared out yet.

        Args:
            fraction: Fraction of the workers that hold a layer.
        """
        self.fraction = fraction
        self.costs: Mapping[str, float] = {}
        self.places: dict[str, Place] = {}
        self.workers = self.size = 1

    def cover(self, costs: Mapping[str, float]) -> None:
        """Take the layers named, by their cost; those that have a place keep it."""
        self.costs = costs
        self.settle()

    def settle(self) -> None:
        """Find a place for every layer among the workers that there are now."""
        if self.workers != comm.world_size():
            self.workers, self.places = comm.world_size(), {}
        self.size = column_size(self.fraction, self.workers)
        self.places = assign(self.costs, self.workers, self.size, self.places)

    @property
    def divided(self) -> bool:
        """Whether some worker lacks the state of a layer."""
        if self.workers != comm.world_size():  # they met after the optimizer was built
            self.settle()
        return self.size < self.workers

    def holds(self, name: str) -> bool:
        """Whether this worker keeps the state of a layer."""
        return not self.divided or self.places[name].column == comm.rank() // self.size

    @property
    def column(self) -> comm.Group:
        """The workers that hold what this one holds."""
        return comm.group_of(columns(self.workers, self.size))

    @property
    def row(self) -> comm.Group:
        """Workers of which each layer has one holder."""
        return comm.group_of(rows(self.workers, self.size))

    def share(self, owned: dict[str, Owned]) -> dict[str, dict[str, Tensor]]:
        """What owners compute of the layers that this worker holds, in one collective."""
        if not owned or comm.world_size() == 1:
            return {name: message.compute() for name, message in owned.items()}
        group, own = self.column, comm.rank()
        keys = [(name, key) for name, message in owned.items() for key in message.like]
        found = {n: m.compute() for n, m in owned.items() if self.places[n].owner == own}
        packed: list[Tensor] = []
        for name, key in keys:
            tensor = found[name][key] if name in found else owned[name].like[key]
            packed.append(triangle.pack(tensor) if key in owned[name].symmetric else tensor)
        sources = [group.ranks.index(self.places[name].owner) for name, _ in keys]
        out: dict[str, dict[str, Tensor]] = {name: {} for name in owned}
        for (name, key), tensor in zip(keys, self.spread(packed, sources, group), strict=True):
            like = owned[name].like[key]
            symmetric = key in owned[name].symmetric
            out[name][key] = triangle.unpack(tensor, like.shape[-1]) if symmetric else tensor
        return out

    def complete(self, updates: dict[str, Tensor]) -> dict[str, Tensor]:
        """Preconditioned gradients of all layers, of which this worker's own are right."""
        sources = [self.places[name].column for name in updates]
        found = self.spread(list(updates.values()), sources, self.row)
        return dict(zip(updates, found, strict=True))

    def spread(self, tensors: list[Tensor], sources: list[int], group: comm.Group) -> list[Tensor]:
        """Tensors that members of a group have, by their places in it, on all of them."""
        if len(group.ranks) == 1:
            return tensors
        return spread_flat(
            tensors,
            sources,
            group.ranks.index(comm.rank()),
            len(group.ranks),
            partial(comm.all_reduce_sum, group=group),
            partial(comm.all_gather_vectors, group=group),
        )

    def gathered(self, name: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state of a layer on every worker; on the CPU where it isn't held."""
        if not self.divided:
            return state
        group = self.row
        held = self.holds(name)
        copy = {key: tensor.cpu() for key, tensor in state.items()} if held else None
        found: dict[str, Tensor] = comm.broadcast_object(
            copy, group.ranks[self.places[name].column], group
        )
        return state if held else found
