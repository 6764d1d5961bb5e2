"""Tensors that are spread over workers (DTensors, as FSDP2 and tensor parallelism make).

A worker holds a contiguous block of such a tensor. The functions here take tensors that are not
spread as well, so that callers need no case for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mkor.distributed.comm import is_sharded, ranks_of, replicate
from mkor.distributed.guard import guarded

SPLITS = {"Shard": 0, "_StridedShard": 1}
"""Placements that split a dimension, in the order in which they do: a strided one (FSDP2 over
tensor parallelism) splits what the others have left."""


@dataclass(frozen=True)
class Cut:
    """The part of one dimension that this worker holds.

    Attributes:
        start: Its first index in the whole.
        stop: The index after its last.
        groups: Process groups over which the parts add up to the whole.
        parts: How many parts there are.
    """

    start: int
    stop: int
    groups: tuple[Any, ...] = ()
    parts: int = 1


def cuts(tensor: Tensor, among: tuple[int, ...] | None = None) -> dict[int, Cut]:
    """The dimensions of a tensor that are split, and this worker's part of each.

    Args:
        tensor: Any tensor.
        among: Numbers of workers; splits over others are left out. None takes all.
    """
    if not is_sharded(tensor):
        return {}
    spread: Any = tensor
    mesh, placements = spread.device_mesh, spread.placements
    at = mesh.get_coordinate()
    out: dict[int, Cut] = {}
    splits = [(SPLITS[type(p).__name__], m) for m, p in enumerate(placements) if splitting(p)]
    for _, m in sorted(splits):
        if among is not None and ranks_of(mesh.get_group(m)) != among:
            continue
        dim = placements[m].dim
        cut = out.get(dim, Cut(0, tensor.shape[dim]))
        length = cut.stop - cut.start
        each = -(-length // mesh.size(m))  # as torch.chunk does: the last may be short or empty
        start = cut.start + min(at[m] * each, length)
        stop = min(start + each, cut.stop)
        groups = (*cut.groups, mesh.get_group(m))
        out[dim] = Cut(start, stop, groups, cut.parts * mesh.size(m))
    return out


def splitting(placement: Any) -> bool:
    """Whether a placement splits a dimension over the workers of its mesh dimension."""
    return type(placement).__name__ in SPLITS


def groups_of(tensor: Tensor) -> tuple[Any, ...]:
    """Process groups over which the blocks of a tensor add up to the whole."""
    return tuple(group for cut in cuts(tensor).values() for group in cut.groups)


def local(tensor: Tensor) -> Tensor:
    """The block that this worker holds, sharing memory; needs `no_grad`."""
    block: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return block


@guarded
def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, gathered from the workers that hold the rest; they must all call this."""
    gathered: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return gathered


@guarded
def laid_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A gradient spread as its parameter is; one that workers have yet to add up is added up."""
    if not is_sharded(tensor) or tensor.placements == parameter.placements:  # type: ignore[attr-defined]
        return tensor
    moved: Tensor = tensor.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return moved


@guarded
def laid_as(tensor: Tensor, placements: Any) -> Tensor:
    """This worker's block of a gradient that is spread as `placements` say, if it is spread."""
    if not is_sharded(tensor):
        return tensor
    # The gradient of what workers have yet to add up is the same on all of them.
    wanted = [replicate() if placement.is_partial() else placement for placement in placements]
    return local(tensor.redistribute(placements=wanted))  # type: ignore[attr-defined]


def placements_of(tensor: Tensor) -> Any:
    """How a tensor is spread; None if it isn't."""
    return tensor.placements if is_sharded(tensor) else None  # type: ignore[attr-defined]


def splits_rows(tensor: Tensor) -> bool:
    """Whether a dimension of a tensor but the last is split."""
    return any(dim % tensor.dim() != tensor.dim() - 1 for dim in cuts(tensor))


def alike(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are spread over the same workers."""
    if not is_sharded(tensor) or not is_sharded(other):
        return is_sharded(tensor) == is_sharded(other)
    return bool(tensor.device_mesh == other.device_mesh)  # type: ignore[attr-defined]


def copy_block_(tensor: Tensor, source: Tensor) -> None:
    """Copy this worker's block of a whole tensor into the tensor that it holds it of."""
    for dim, cut in cuts(tensor).items():
        source = source.narrow(dim, cut.start, cut.stop - cut.start)
    local(tensor).copy_(source)


def placed(block: Tensor, tensor: Tensor) -> Tensor:
    """Values [n', …] of this worker's rows of a tensor as those of all rows, zero elsewhere.

    Args:
        block: One value, or several, a row of the block.
        tensor: What it is a block of; its first dimension has n rows.
    """
    cut = cuts(tensor).get(0)
    if cut is None:
        return block
    out = torch.zeros(tensor.shape[0], *block.shape[1:], dtype=block.dtype, device=block.device)
    out[cut.start : cut.stop] = block
    return out


def laid_out(source: Tensor, tensor: Tensor) -> Tensor:
    """A whole tensor spread as another is, if that is spread."""
    if not is_sharded(tensor):
        return source
    with torch.no_grad():
        out = torch.zeros_like(tensor, dtype=source.dtype)
        copy_block_(out, source)
    return out
