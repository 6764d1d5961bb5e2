"""Small linear algebra that two or more methods share: pure functions, leading dimensions batch.

Half precision needs care on the CPU: float16 products there are a hundred times slower than
float32 ones, while bfloat16 products are faster. The helpers hide that choice.

Shapes: G stack, d side of a factor, r vectors, o and i the sides of a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

STRIPE = 256
"""Rows of the bands in which wide matrices are made: what a band takes stays in caches."""

CACHED = 2**22
"""Entries of a matrix that stays in caches as a whole."""


def slow_half(tensor: Tensor) -> bool:
    """Whether matrix products of this tensor have no fast kernel (float16 on the CPU)."""
    return tensor.dtype == torch.float16 and tensor.device.type == "cpu"


def apply_factor(factor: Tensor, vectors: Tensor) -> Tensor:
    """Product `factor @ vectors` in the factor's dtype, without a copy of the factor.

    Args:
        factor: Symmetric matrices, [G, d, d].
        vectors: Columns, [G, d, r], float32 or float64, with entries that the factor's dtype holds.

    Returns:
        The product [G, d, r] in the dtype of `vectors`.
    """
    ready = vectors.to(factor.dtype)  # [G, d, r]
    if factor.shape[0] == 1 and vectors.shape[-1] == 1:
        return torch.mv(factor[0], ready[0, :, 0]).view_as(ready).to(vectors.dtype)
    return (factor @ ready).to(vectors.dtype)


def add_low_rank_(
    matrix: Tensor, columns: Tensor, sign: float, scale: Tensor | None = None
) -> Tensor:
    """In place `matrix ← scale · matrix + sign · columns columnsᵀ`, without a temporary of it.

    A wide matrix goes in bands, so that what was scaled is still in the caches.

    Args:
        matrix: Symmetric matrices, [G, d, d].
        columns: [G, d, r], any float dtype.
        sign: +1 or -1.
        scale: [G], or None for 1.
    """
    side = matrix.shape[-1]
    columns = columns.to(matrix.dtype)
    band = STRIPE if side * side > CACHED else side
    for part, own in zip(matrix.split(band, dim=1), columns.split(band, dim=1), strict=True):
        if scale is not None:
            part.mul_(scale[:, None, None])
        add_outer_(part, own, columns, sign)
    return matrix


def add_outer_(matrix: Tensor, left: Tensor, right: Tensor, sign: float) -> None:
    """In place `matrix += sign · left rightᵀ`: [G, o, i], [G, o, r] and [G, i, r] of one dtype."""
    if (matrix.dtype == torch.float32 and left.shape[-1] == 1) or slow_half(matrix):
        for row, column in zip(left.split(1, dim=-1), right.split(1, dim=-1), strict=True):
            matrix.addcmul_(row, column.mT, value=sign)
    else:
        matrix.baddbmm_(left, right.mT, alpha=sign)


def add_gram_(matrix: Tensor, rows: Tensor) -> Tensor:
    """In place `matrix += rowsᵀ rows`; of wide matrices only one triangle is multiplied out.

    The other is then a copy of it, so `matrix` must be symmetric.

    Args:
        matrix: Symmetric matrices, [G, d, d].
        rows: [G, n, d], same dtype.
    """
    side = matrix.shape[-1]
    if side < 2 * STRIPE:
        return matrix.baddbmm_(rows.mT, rows)
    for start in range(0, side, STRIPE):
        end = min(start + STRIPE, side)
        matrix[:, start:end, start:].baddbmm_(rows[..., start:end].mT, rows[..., start:])
        matrix[:, end:, start:end] = matrix[:, start:end, end:].mT
    return matrix


def sandwich(left: Tensor | None, grad: Tensor, right: Tensor | None) -> Tensor:
    """The product `left · grad · right` with either side absent, in the factors' dtype.

    Args:
        left: [G, o, o] or None for the identity.
        grad: [G, o, i].
        right: [G, i, i] or None for the identity.

    Returns:
        [G, o, i], in the dtype of the products.
    """
    out = grad
    if left is not None:
        ready = left.float() if slow_half(left) else left
        out = out.to(ready.dtype)
        # A bias makes i odd: kernels lose some speed to an odd number of columns, none to one of
        # rows. Those for bfloat16 would copy what is transposed.
        turned = right is not None and ready.dtype != torch.bfloat16
        out = (out.mT @ ready.mT).mT if turned else ready @ out
    if right is not None:
        ready = right.float() if slow_half(right) else right
        out = out.to(ready.dtype) @ ready
    return out


def frobenius(matrix: Tensor) -> Tensor:
    """The Frobenius norms [G, 1, 1] of matrices [G, o, i]."""
    norm: Tensor = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)
    return norm


def norm_of(pieces: Sequence[Tensor]) -> Tensor:
    """The Frobenius norms [G, 1, 1] of matrices in pieces [G, o, …] of their columns."""
    norms = [frobenius(piece) for piece in pieces]
    return norms[0] if len(norms) == 1 else frobenius(torch.cat(norms, dim=-1))


def subtract_product_(pieces: Sequence[Tensor], left: Tensor, right: Tensor) -> None:
    """∇ - left·right in place, of a matrix ∇ in pieces; ∇ stays where the result may not be finite.

    Args:
        pieces: ∇ in pieces [G, o, …] of its columns.
        left: [G, o, k].
        right: [G, k, i].
    """
    sound = (frobenius(left) * frobenius(right)) < math.inf  # [G, 1, 1]
    left, right = torch.where(sound, left, 0), torch.where(sound, right, 0)
    for piece, own in zip(pieces, right.split([p.shape[-1] for p in pieces], -1), strict=True):
        if len(piece) == 1:
            piece[0].addmm_(left[0], own[0], alpha=-1)
        else:
            piece.baddbmm_(left, own, alpha=-1)
