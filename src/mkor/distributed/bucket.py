"""Many small tensors in one flat buffer, so that an update costs one collective a device."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def reduce_flat(
    tensors: list[Tensor], reduce: Callable[[Tensor], Tensor], wire_dtype: torch.dtype | None
) -> list[Tensor]:
    """Reduce every tensor through flat buffers, one per device.

    Args:
        tensors: Tensors of any shapes and float dtypes.
        reduce: Reduces a flat tensor over workers.
        wire_dtype: Dtype on the wire; the widest dtype of the tensors where None.

    Returns:
        New tensors in the order, shapes and dtypes of the old.
    """
    out: list[Tensor] = list(tensors)
    for where in dict.fromkeys(tensor.device for tensor in tensors):
        index = [i for i, tensor in enumerate(tensors) if tensor.device == where]
        dtype = wire_dtype or widest([tensors[i].dtype for i in index])
        flat = reduce(
            torch.cat([tensors[i].reshape(-1).to(dtype) for i in index])
        )  # [sum of sizes]
        parts = flat.split([tensors[i].numel() for i in index])
        for i, part in zip(index, parts, strict=True):
            out[i] = part.view(tensors[i].shape).to(tensors[i].dtype)
    return out


def gather_flat(
    tensors: list[Tensor],
    counts: Callable[[list[int], torch.device], list[list[int]]],
    gather: Callable[[Tensor, list[int]], list[Tensor]],
    wire_dtype: torch.dtype | None,
) -> list[Tensor]:
    """Concatenate tensors [G, m, …] of all workers along m through one flat buffer a device.

    Args:
        tensors: Tensors of any float dtypes; m may differ between workers.
        counts: Gathers a list of integers from every worker.
        gather: Gathers vectors of known lengths.
        wire_dtype: Dtype on the wire; the widest dtype of the tensors where None.

    Returns:
        New tensors in the order and dtypes of the old.
    """
    out: list[Tensor] = list(tensors)
    for where in dict.fromkeys(tensor.device for tensor in tensors):
        index = [i for i, tensor in enumerate(tensors) if tensor.device == where]
        dtype = wire_dtype or widest([tensors[i].dtype for i in index])
        flat = torch.cat([tensors[i].reshape(-1).to(dtype) for i in index])
        rows = counts([tensors[i].shape[1] for i in index], where)  # by worker and tensor
        shapes = [
            [
                (tensors[i].shape[0], m, *tensors[i].shape[2:])
                for i, m in zip(index, own, strict=True)
            ]
            for own in rows
        ]
        lengths = [sum(math.prod(shape) for shape in own) for own in shapes]
        vectors = [
            vector.split([math.prod(shape) for shape in own])
            for vector, own in zip(gather(flat, lengths), shapes, strict=True)
        ]
        for place, i in enumerate(index):
            parts = [v[place].view(s[place]) for v, s in zip(vectors, shapes, strict=True)]
            out[i] = torch.cat(parts, dim=1).to(tensors[i].dtype)
    return out


def spread_flat(
    tensors: list[Tensor],
    sources: list[int],
    own: int,
    members: int,
    reduce: Callable[[Tensor], Tensor],
    gather: Callable[[Tensor, list[int]], list[Tensor]],
) -> list[Tensor]:
    """Bring tensors that one worker each has to all, through one flat buffer a device.

    Args:
        tensors: What this worker has, and of the others' any of the same shape, dtype and device.
        sources: The worker that has it, for each tensor.
        own: This worker.
        members: Number of workers.
        reduce: Adds flat tensors up.
        gather: Gathers vectors of known lengths, by worker.

    Returns:
        The tensors as their workers have them.
    """
    out: list[Tensor] = list(tensors)
    for where in dict.fromkeys(tensor.device for tensor in tensors):
        index = [i for i, tensor in enumerate(tensors) if tensor.device == where]
        index.sort(key=sources.__getitem__)
        dtype = widest([tensors[i].dtype for i in index])
        lengths = [0] * members
        for i in index:
            lengths[sources[i]] += tensors[i].numel()
        mine = [tensors[i].reshape(-1).to(dtype) for i in index if sources[i] == own]
        flat = torch.cat([torch.empty(0, dtype=dtype, device=where), *mine])
        if gathers(lengths):
            flat = torch.cat(gather(flat, lengths))
        else:
            before, after = sum(lengths[:own]), sum(lengths[own + 1 :])
            flat = reduce(torch.nn.functional.pad(flat, (before, after)))
        parts = flat.split([tensors[i].numel() for i in index])
        for i, part in zip(index, parts, strict=True):
            out[i] = part.view(tensors[i].shape).to(tensors[i].dtype)
    return out


def gathers(lengths: list[int]) -> bool:
    """Whether vectors of these lengths are best gathered, or else added up with zeros between.

    Gathered ones are padded to the longest; a sum is sent twice.
    """
    return len(lengths) * max(lengths) <= 2 * sum(lengths)


def widest(dtypes: list[torch.dtype]) -> torch.dtype:
    """The dtype that holds them all."""
    out = dtypes[0]
    for dtype in dtypes[1:]:
        out = torch.promote_types(out, dtype)
    return out
