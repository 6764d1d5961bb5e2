"""The only import of torch.distributed. One worker is a path of it, not a case elsewhere."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Joinable, JoinHook

from mkor.distributed.guard import guarded

__all__ = ["JoinHook", "Joinable"]


def world_size() -> int:
    """Number of workers; 1 where torch.distributed isn't initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Number of this worker, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


@dataclass(frozen=True)
class Group:
    """Workers that exchange among themselves, this one among them.

    Attributes:
        ranks: Their numbers.
        handle: torch's process group; None for that of all workers, or where this one is alone.
    """

    ranks: tuple[int, ...]
    handle: Any = None


@functools.cache
def _groups(ranks: tuple[tuple[int, ...], ...], world: object) -> Any:
    del world  # groups end with the one that they are part of
    return dist.new_subgroups_by_enumeration([list(own) for own in ranks])[0]


@guarded
def group_of(ranks: list[list[int]]) -> Group:
    """The group among `ranks` that this worker is in; all workers must ask alike."""
    own = next(tuple(members) for members in ranks if rank() in members)
    if len(own) in {1, world_size()}:
        return Group(own)
    return Group(own, _groups(tuple(map(tuple, ranks)), dist.group.WORLD))


@guarded
def all_reduce_sum(flat: Tensor, group: Group | None = None) -> Tensor:
    """Sum a flat tensor over the workers of a group, in place; as it is on one worker."""
    if world_size() > 1:
        dist.all_reduce(flat, group=None if group is None else group.handle)
    return flat


@guarded
def all_reduce_max(flat: Tensor) -> Tensor:
    """The largest of each entry over workers, in place."""
    if world_size() > 1:
        dist.all_reduce(flat, op=dist.ReduceOp.MAX)
    return flat


@guarded
def all_reduce_over(flat: Tensor, groups: tuple[Any, ...]) -> Tensor:
    """Sum a flat tensor over process groups, one after the other, in place."""
    for group in groups:
        dist.all_reduce(flat, group=group)
    return flat


@guarded
def all_reduce_ends(flat: Tensor) -> tuple[Tensor, Tensor]:
    """The largest and the smallest of each entry over workers; one collective."""
    both = torch.stack([flat, ~flat])
    if world_size() > 1:
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return both[0], ~both[1]


@guarded
def all_gather_vectors(
    flat: Tensor, lengths: list[int], group: Group | None = None
) -> list[Tensor]:
    """The vectors [lengths[w]] of all workers w of a group, of which `flat` is this one's."""
    longest = max(lengths)
    padded = flat.new_zeros(longest)
    padded[: flat.numel()] = flat
    out = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(out, padded, group=None if group is None else group.handle)
    return [vector[:length] for vector, length in zip(out, lengths, strict=True)]


@guarded
def all_gather_counts(counts: list[int], device: torch.device | None) -> list[list[int]]:
    """The counts of all workers, read on the host."""
    own = torch.tensor(counts, device=device)
    out = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(out, own)
    return [tensor.tolist() for tensor in out]


def everyone() -> Any:
    """Torch's process group of all workers."""
    return dist.group.WORLD


@guarded
def largest(number: int, device: torch.device) -> int:
    """The largest of what workers have."""
    own = torch.tensor(number, device=device)
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    return int(own)


@guarded
def broadcast_object(thing: Any, source: int, group: Group) -> Any:
    """What the worker `source` has, on all workers of its group; pickled on the way."""
    box = [thing]
    dist.broadcast_object_list(box, source, group=group.handle)
    return box[0]


def ranks_of(handle: Any) -> tuple[int, ...]:
    """The numbers of the workers of torch's process group."""
    return tuple(dist.get_process_group_ranks(handle))


def replicate() -> Any:
    """The placement of what workers have whole."""
    from torch.distributed.tensor import Replicate

    return Replicate()


def is_sharded(tensor: Tensor) -> bool:
    """Whether a parameter is spread over workers (a DTensor, as FSDP2 makes)."""
    if not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)
