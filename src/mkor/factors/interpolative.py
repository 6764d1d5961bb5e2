"""A few rows that stand for all: the interpolative decomposition of a layer's kernel.

With u_j = g_j ⊗ a_j as columns of U and K = UᵀU, a Cholesky factorisation of K that pivots on the
largest remaining diagonal entry (a pivoted QR of U) stops after m steps. Its m pivots are the rows
s that are kept, and every row is written in them, U ≈ U_s Pᵀ with P = [I; K_2s K_ss⁻¹] [n, m]. So

    F = UUᵀ ≈ U_s (PᵀP) U_sᵀ,
    (F + μI)⁻¹ ∇ ≈ (∇ - U_s (K_ss + μ(PᵀP)⁻¹)⁻¹ U_sᵀ∇) / μ.

(PᵀP)⁻¹ depends on no scale: neither on μ, nor on the number of rows, nor on a loss scale, none of
which are known while a backward pass runs. The n rows are cut into chunks, each with its own
decomposition, so that memory and work stay linear in n; (PᵀP)⁻¹ then is a matrix of blocks.

It travels with the rows, as a band: "prior" [G, m, w], the entries of each row's block, and "first"
[G, m], 1 where a block begins. Chunks, calls and workers are concatenated, and `blocks` rebuilds
the matrix.

Shapes: G stack, n rows, m kept rows, o and i sides, w width of the band, B chunks of a stack.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mkor.factors.rows import pick, share, widened

CHUNK = 1024
"""Most rows that are decomposed together."""

ROUNDING = 100.0
"""Size of a pivot below which it is noise, in units of the rounding of the largest entry of K."""


def width(rank: float) -> int:
    """Width w of the band, the same for any number of rows."""
    return share(CHUNK, rank)


def decompose(inputs: Tensor, grads: Tensor, seed: int, *, rank: float) -> dict[str, Tensor]:
    """Keep a fraction `rank` of the rows, and how all of them are written in those.

    Args:
        inputs: a, [G, n, i].
        grads: g, [G, n, o].
        seed: Plays no part; nothing is drawn.
        rank: The fraction of rows to keep.

    Returns:
        "inputs" [G, m, i], "grads" [G, m, o], "prior" [G, m, w] and "first" [G, m]; not finite
        where any of the n rows isn't.
    """
    del seed
    inputs, grads = widened(inputs), widened(grads)
    stack, rows = inputs.shape[:2]
    if not rows:
        band = inputs.new_zeros(stack, 0, width(rank))
        return {"inputs": inputs, "grads": grads, "prior": band, "first": band.sum(dim=-1)}
    chunks = math.ceil(rows / CHUNK)
    a, g = cut(inputs, chunks), cut(grads, chunks)  # [G·B, n/B, d]
    kept = share(a.shape[1], rank)
    finite = torch.isfinite(a).all(dim=(1, 2)) & torch.isfinite(g).all(dim=(1, 2))
    each = finite[:, None, None]
    index, columns = pivots(normed(torch.where(each, a, 0)), normed(torch.where(each, g, 0)), kept)
    band = torch.nn.functional.pad(inverse_weights(index, columns), (0, width(rank) - kept))
    first = torch.zeros_like(band[..., 0])
    first[:, 0].fill_(1)
    outputs = torch.where(each, pick(g, index), torch.nan)
    parts = {"inputs": pick(a, index), "grads": outputs, "prior": band, "first": first}
    return {key: part.reshape(stack, -1, *part.shape[2:]) for key, part in parts.items()}


def blocks(band: Tensor, first: Tensor) -> Tensor:
    """The matrix (PᵀP)⁻¹ [G, m, m] from its band [G, m, w] and where its blocks begin [G, m]."""
    stack, rows, wide = band.shape
    place = torch.arange(rows, device=band.device).expand(stack, -1)
    start = torch.where(first > 0.5, place, 0).cummax(dim=-1).values  # of each row's block
    columns = start[..., None] + torch.arange(wide, device=band.device)  # [G, m, w]
    # Beyond the end of a narrow block the band is zero, and so is what it is written to.
    out = band.new_zeros(stack, rows, rows + wide)
    return out.scatter_(2, columns, band)[..., :rows]


def cut(rows: Tensor, chunks: int) -> Tensor:
    """Rows [G, n, d] as chunks of equal length, the last filled up with zeros, [G·B, n/B, d]."""
    stack, count, side = rows.shape
    length = math.ceil(count / chunks)
    padded = torch.nn.functional.pad(rows, (0, 0, 0, chunks * length - count))
    return padded.view(stack * chunks, length, side)


def normed(rows: Tensor) -> Tensor:
    """Rows [B, n, d] over their largest entry: the pivots are the same, and nothing overflows."""
    return rows / rows.abs().amax(dim=(1, 2), keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)


def pivots(inputs: Tensor, grads: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """Pivoted Cholesky of K = (aaᵀ) ⊙ (ggᵀ), `kept` steps, without forming K.

    Args:
        inputs: a, [B, n, i].
        grads: g, [B, n, o].
        kept: m, at most n.

    Returns:
        The pivots [B, m] and the columns C [B, n, m] of K ≈ CCᵀ. A pivot of rounding size has a
        column of zeros.
    """
    left = inputs.square().sum(dim=-1) * grads.square().sum(dim=-1)  # residual diagonal, [B, n]
    noise = ROUNDING * torch.finfo(left.dtype).eps * left.amax(dim=-1, keepdim=True)  # [B, 1]
    columns = left.new_zeros(*left.shape, kept)
    index = torch.empty(left.shape[0], kept, dtype=torch.int64, device=left.device)
    for k in range(kept):
        at = left.argmax(dim=-1, keepdim=True)  # [B, 1]
        size = left.gather(1, at)
        column = (inputs @ pick(inputs, at).mT) * (grads @ pick(grads, at).mT)  # [B, n, 1]
        column -= columns[..., :k] @ pick(columns[..., :k], at).mT
        column = column[..., 0] * torch.where(size > noise, size, torch.inf).rsqrt()
        column = column.masked_fill(left == -torch.inf, 0)  # rows kept before have no residual
        index[:, k], columns[..., k] = at[:, 0], column
        left = (left - column.square()).scatter_(1, at, -torch.inf)
    return index, columns


def inverse_weights(index: Tensor, columns: Tensor) -> Tensor:
    """(PᵀP)⁻¹ = (I + TᵀT)⁻¹ for P = [I; T], with T = C_2 C_s⁻¹, [B, m, m]."""
    inner = pick(columns, index).tril()  # C_s, [B, m, m]
    diagonal = inner.diagonal(dim1=-2, dim2=-1)
    diagonal.copy_(torch.where(diagonal > 0, diagonal, 1))  # a column of zeros stays one
    rest = columns.scatter(1, index[..., None].expand_as(inner), 0)
    rest = torch.linalg.solve_triangular(inner, rest, upper=False, left=False)  # T, [B, n, m]
    weights = rest.mT @ rest
    weights.diagonal(dim1=-2, dim2=-1).add_(1)
    return torch.cholesky_inverse(torch.linalg.cholesky_ex(weights).L)
