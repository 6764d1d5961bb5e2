"""The only import of torch.distributed. One worker is a path of it, not a case elsewhere."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Number of workers; 1 where torch.distributed isn't initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def all_reduce_sum(flat: Tensor) -> Tensor:
    """Sum a flat tensor over workers, in place; returned as it is on one worker."""
    if world_size() > 1:
        dist.all_reduce(flat)
    return flat


def is_sharded(tensor: Tensor) -> bool:
    """Whether a parameter is spread over workers (a DTensor, as FSDP2 makes)."""
    if not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)
