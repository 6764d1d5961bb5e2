"""Many small tensors in one flat buffer, so that an update costs one collective a device.

float16 ends at 65,504 and at 6e-8: sums over many rows overflow in it, and covariances of gradients
vanish. So each tensor that crosses in it is multiplied by a power of two, which rounds nothing;
workers agree on the powers by one small collective before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mkor.distributed import comm

HALF_EXPONENT = 15
"""Sums of all workers stay below 2 to this power in float16, half of what it holds."""

LEAST_EXPONENT = -100
"""Of tensors whose scale is finite in float32; smaller ones are scaled by no more."""


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
        flat, scales = written([tensors[i] for i in index], wire_dtype)
        parts = reduce(flat).split([tensors[i].numel() for i in index])
        for i, part, scale in zip(index, parts, scales, strict=True):
            out[i] = read(part.view(tensors[i].shape), scale, tensors[i].dtype)
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
        flat, scales = written([tensors[i] for i in index], wire_dtype)
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
        for place, (i, scale) in enumerate(zip(index, scales, strict=True)):
            parts = [v[place].view(s[place]) for v, s in zip(vectors, shapes, strict=True)]
            out[i] = read(torch.cat(parts, dim=1), scale, tensors[i].dtype)
    return out


def written(
    tensors: list[Tensor], wire_dtype: torch.dtype | None
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Tensors of one device as a flat one in the wire's dtype, and what they are multiplied by."""
    dtype = wire_dtype or widest([tensor.dtype for tensor in tensors])
    scales = half_scales(tensors) if dtype is torch.float16 else [None] * len(tensors)
    scaled = [
        tensor if scale is None else tensor.to(scale.dtype) * scale
        for tensor, scale in zip(tensors, scales, strict=True)
    ]
    return torch.cat([tensor.reshape(-1).to(dtype) for tensor in scaled]), scales  # [sum of sizes]


def half_scales(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Powers of two that fit the sums of all workers' tensors into float16; alike on all workers.

    A tensor that isn't finite is left as it is, so that whoever gets it sees that.
    """
    own = [largest_entry(tensor) for tensor in tensors]
    dtype = scale_dtype([entry.dtype for entry in own])
    most = comm.all_reduce_max(torch.stack([entry.to(dtype) for entry in own]))  # [tensors]
    most = most * comm.world_size()
    exponent = torch.frexp(most).exponent.clamp(min=LEAST_EXPONENT)
    scales = torch.ldexp(torch.ones_like(most), HALF_EXPONENT - exponent)
    return torch.where(most.isfinite(), scales, 1.0).unbind()


def read(tensor: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A tensor that has crossed, in its own dtype and scale."""
    return (tensor if scale is None else tensor.to(scale.dtype) / scale).to(dtype)


def largest_entry(tensor: Tensor) -> Tensor:
    """The largest absolute value [], zero of a tensor without entries."""
    return tensor.abs().amax() if tensor.numel() else tensor.new_zeros(())


def scale_dtype(dtypes: list[torch.dtype]) -> torch.dtype:
    """Dtype of the scales of tensors: that of the widest, at least float32."""
    return widest([torch.float32, *dtypes])


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
