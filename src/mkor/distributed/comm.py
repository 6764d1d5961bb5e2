"""The only import of torch.distributed. One worker is a path of it, not a case elsewhere."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Number of workers; 1 where torch.distributed isn't initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Number of this worker, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def all_reduce_sum(flat: Tensor) -> Tensor:
    """Sum a flat tensor over workers, in place; returned as it is on one worker."""
    if world_size() > 1:
        dist.all_reduce(flat)
    return flat


def all_reduce_over(flat: Tensor, groups: tuple[Any, ...]) -> Tensor:
    """Sum a flat tensor over process groups, one after the other, in place."""
    for group in groups:
        dist.all_reduce(flat, group=group)
    return flat


def all_reduce_ends(flat: Tensor) -> tuple[Tensor, Tensor]:
    """The largest and the smallest of each entry over workers; one collective."""
    both = torch.stack([flat, ~flat])
    if world_size() > 1:
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return both[0], ~both[1]


def all_gather_vectors(flat: Tensor, lengths: list[int]) -> list[Tensor]:
    """The vectors [lengths[w]] of all workers w, of which `flat` is this one's."""
    longest = max(lengths)
    padded = flat.new_zeros(longest)
    padded[: flat.numel()] = flat
    out = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(out, padded)
    return [vector[:length] for vector, length in zip(out, lengths, strict=True)]


def all_gather_counts(counts: list[int], device: torch.device | None) -> list[list[int]]:
    """The counts of all workers, read on the host."""
    own = torch.tensor(counts, device=device)
    out = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(out, own)
    return [tensor.tolist() for tensor in out]


def is_sharded(tensor: Tensor) -> bool:
    """Whether a parameter is spread over workers (a DTensor, as FSDP2 makes)."""
    if not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)
