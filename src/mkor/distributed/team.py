"""Workers that compute one batch together, as tensor parallelism has them do.

Every one of them sees all rows of a batch, but of some layers a part of the rows' entries: of the
outputs where the weight is split by its rows, of the inputs where it is split by its columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mkor.distributed import comm
from mkor.distributed.sharded import splitting


@dataclass(frozen=True)
class Team:
    """The workers with this one's batch; by default it alone.

    Attributes:
        ranks: Their numbers, this one's among them; none where it is alone.
        handle: torch's process group of them.
    """

    ranks: tuple[int, ...] = ()
    handle: Any = None

    @property
    def size(self) -> int:
        """How many workers compute a batch."""
        return max(1, len(self.ranks))

    @property
    def place(self) -> int:
        """This worker's place in the team, from 0."""
        return self.ranks.index(comm.rank()) if self.ranks else 0

    @property
    def number(self) -> int:
        """This team's number among those of all workers, from 0, if all are laid out alike."""
        if not self.ranks:
            return comm.rank()
        first, stride = self.ranks[0], self.ranks[1] - self.ranks[0]
        return first // (stride * self.size) * stride + first % stride

    def seed(self, step: int) -> int:
        """A number of its own for every step of every team."""
        return step * (comm.world_size() // self.size) + self.number

    def total(self, share: Tensor) -> Tensor:
        """The sum of what the workers have, in place."""
        return comm.all_reduce_over(share, (self.handle,)) if self.ranks else share


ALONE = Team()
"""The team of a worker that shares its batch with nobody."""


def team_of(model: nn.Module) -> Team:
    """The team that the parameters of a model tell of.

    Raises:
        ValueError: They are spread in a way that is neither FSDP2's nor that of one team.
    """
    managed = managed_by_fsdp(model)
    found: dict[tuple[int, ...], tuple[Team, str]] = {}
    for name, parameter in model.named_parameters():
        dims = team_dims(parameter, id(parameter) in managed)
        if len(dims) > 1:
            raise ValueError(
                f"parameter '{name}' is a DTensor spread over {len(dims)} dimensions of a mesh "
                "besides those of FSDP2: one is supported, that of tensor parallelism; give "
                "parallelize_module a mesh of one dimension"
            )
        for dim in dims:
            group = parameter.device_mesh.get_group(dim)  # type: ignore[attr-defined]
            ranks = comm.ranks_of(group)
            found.setdefault(ranks, (Team(ranks, group), name))
    if len(found) > 1:
        (one, first), (other, second), *_ = found.values()
        raise ValueError(
            f"parameter '{first}' is spread over the workers {list(one.ranks)} and '{second}' over "
            f"{list(other.ranks)}: give all tensor-parallel layers the same mesh"
        )
    return next((team for team, _ in found.values()), ALONE)


def managed_by_fsdp(model: nn.Module) -> set[int]:
    """The `id` of the parameters that FSDP2 shards."""
    out: set[int] = set()
    for module in model.modules():
        if any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__):
            out |= {id(parameter) for parameter in module.parameters()}
    return out


def team_dims(parameter: Tensor, managed: bool) -> list[int]:
    """Dimensions of a parameter's mesh, longer than 1, that belong to tensor parallelism.

    FSDP2's come first: those of its replicas, and the one that it splits.
    """
    if not comm.is_sharded(parameter):
        return []
    spread: Any = parameter
    splits = [m for m, placement in enumerate(spread.placements) if splitting(placement)]
    first = splits[0] + 1 if managed and splits else 0
    return [m for m in range(first, spread.device_mesh.ndim) if spread.device_mesh.size(m) > 1]
