"""A side's inverse kept as a few rows: J = I - (PB)ᵀ(PB), never formed.

The rows stand for a covariance C = Bᵀ D² B of unit rows B [k, d] and sizes D. With β = μ·tr(C),

    J = β (C + βI)⁻¹ = I - (PB)ᵀ(PB),   P = L⁻¹D,   LLᵀ = βI + D BBᵀ D   (Woodbury),

so that J has its eigenvalues in (0, 1], whatever the scale of the rows, and leaves directions that
no row has as they are. P comes from the Gram matrix of the rows as they are stored: J belongs
exactly to the rounded rows and is positive definite in half precision as well. What the arithmetic
itself rounds is ε/√μ, which must be less than the smallest eigenvalue, about μ. So ε^⅔ bounds μ
from below, 5e-5 in float32.

What the representations share is a dict of tensors; `window` and `lowrank` add one each.

| part | shape | |
| ---- | ----- | - |
| rows | [G, k, d] | B, of length 1 or 0, in the state's dtype |
| sizes | [G, k] | D, in the unit of the statistics |
| gram | [G, k, k] | BBᵀ |
| root | [G, k, k] | P with D in parts of √tr(C) |

Shapes: G stack, k rows, r vectors of an update, d side, o and i the sides of a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mkor.blocks import Block, Blockwise, Shares, columns_of, counted, rows_of

Parts = dict[str, Tensor]

ROUNDING = 2.0
"""Least eigenvalue of a factor, in units of ε^⅔."""


@dataclass(frozen=True)
class Vectors:
    """An update's vectors as unit rows and their lengths."""

    rows: Tensor  # [G, r, d], zero where a vector is zero or not finite
    sizes: Tensor  # [G, r]
    finite: Tensor  # [G], whether all of them were


def init(stack: int, count: int, side: int, dtype: torch.dtype, where: torch.device) -> Parts:
    """No rows yet: J = I."""
    small = torch.promote_types(dtype, torch.float32)
    square = (stack, count, count)
    return {
        "rows": torch.zeros(stack, count, side, dtype=dtype, device=where),
        "sizes": torch.zeros(stack, count, dtype=small, device=where),
        "gram": torch.zeros(square, dtype=small, device=where),
        "root": torch.zeros(square, dtype=small, device=where),
    }


def prepare(vectors: Tensor) -> Vectors:
    """Columns [G, d, r] as unit rows with lengths, in a way that no square overflows."""
    rows = vectors.mT
    largest = rows.abs().amax(dim=-1, keepdim=True)  # [G, r, 1]
    finite = torch.isfinite(largest)
    safe = largest.clamp_min(torch.finfo(rows.dtype).tiny)
    scaled = torch.where(finite, rows / safe, 0)
    length = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    unit = scaled / length.clamp_min(torch.finfo(rows.dtype).tiny)
    sizes = torch.where(finite, length * largest, 0)[..., 0]
    return Vectors(unit, sizes, finite.all(dim=1)[:, 0])


def solve_root(relative: Tensor, gram: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """P [G, k, k] of rows whose sizes are relative to √tr(C), and whether it is sound, [G].

    Args:
        relative: D/√tr(C), [G, k].
        gram: BBᵀ of the rows as they are stored, [G, k, k].
        damping: μ.
    """
    least = smallest(gram.dtype)
    inner = gram * relative[:, :, None] * relative[:, None, :]  # D BBᵀ D / tr(C)
    inner.diagonal(dim1=-2, dim2=-1).add_(max(damping, least))
    lower, info = torch.linalg.cholesky_ex(inner)
    ready = torch.where((info == 0)[:, None, None], lower, torch.eye(lower.shape[-1]).to(lower))
    root = torch.linalg.solve_triangular(ready, torch.diag_embed(relative), upper=False)
    return root, (info == 0) & torch.isfinite(root).flatten(1).all(dim=-1)


def spectral_root(
    relative: Tensor, gram: Tensor, damping: Tensor, power: float
) -> tuple[Tensor, Tensor]:
    """P [G, k, k] of J = (β(C + βI)⁻¹)^p for eigenvectors, and whether it is sound, [G].

    Eigenvectors that were rounded are no longer orthogonal. With LLᵀ = BBᵀ of the rows as they are
    stored, those of L⁻¹B are, so that J = I - (L⁻¹B)ᵀ(1 - (μ/(μ + λ))^p)(L⁻¹B) has exactly the
    eigenvalues that it should.

    Args:
        relative: Square roots of the eigenvalues λ in parts of tr(C), [G, k].
        gram: BBᵀ of the rows as they are stored, [G, k, k].
        damping: μ, [G].
        power: p.
    """
    damping = damping.clamp_min(smallest(gram.dtype) ** (1 / power))[:, None]
    kept = 1 - (damping / (damping + relative.square())) ** power  # [G, k]
    absent = gram.diagonal(dim1=-2, dim2=-1) == 0
    lower, info = torch.linalg.cholesky_ex(gram + torch.diag_embed(absent.to(gram)))
    eye = torch.eye(lower.shape[-1]).to(lower)
    ready = torch.where((info == 0)[:, None, None], lower, eye)
    root = torch.linalg.solve_triangular(ready, eye.expand_as(lower), upper=False)
    root = root * kept.sqrt()[:, :, None]
    return root, (info == 0) & torch.isfinite(root).flatten(1).all(dim=-1)


def smallest(dtype: torch.dtype) -> float:
    """The least eigenvalue that a factor may have: what rounding leaves of it is above zero."""
    least: float = torch.finfo(dtype).eps ** (2 / 3)
    return ROUNDING * least


def total(sizes: Tensor) -> Tensor:
    """√Σ sizes² without overflow, [G]."""
    return relative_to(sizes, sizes.amax(dim=-1)).square().sum(dim=-1).sqrt() * sizes.amax(dim=-1)


def relative_to(sizes: Tensor, unit: Tensor) -> Tensor:
    """Sizes [G, k] in parts of a unit [G]; 0 where that is 0."""
    unit = unit[:, None]
    return torch.where(unit > 0, sizes / unit, 0)


def write_(parts: Parts, new: Parts, where: Tensor) -> None:
    """In place take the new tensors for the matrices named by `where`, [G]."""
    for key, tensor in new.items():
        mask = where.view(-1, *[1] * (tensor.dim() - 1))
        old = parts[key]
        torch.where(mask, tensor.to(old.dtype), old, out=old)


def reset_(parts: Parts, where: Tensor) -> None:
    """In place forget the rows of the matrices named by `where`, [G]."""
    for tensor in parts.values():
        tensor.masked_fill_(where.view(-1, *[1] * (tensor.dim() - 1)), 0)


def precondition(outputs: Parts, inputs: Parts, grad: Tensor) -> Tensor:
    """J_g ∇ J_a of a gradient [G, o, i], in the dtype of the small matrices or wider."""
    grad = grad.to(torch.promote_types(grad.dtype, outputs["root"].dtype))
    return subtract(grad, *correction(outputs, inputs, (grad,)))


def correction(outputs: Parts, inputs: Parts, pieces: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """What preconditioning takes from a gradient, as a product of inner size k_o + k_i.

    So no more than the result has the gradient's size. With M = PᵀP,

        J_g ∇ J_a = ∇ - [B_gᵀ | ∇B_aᵀM_a] [M_g B_g ∇ J_a ; B_a].

    Args:
        outputs: B_g, P_g.
        inputs: B_a, P_a.
        pieces: ∇ in pieces [G, o, …] of its columns; a last one that lacks is zero.

    Returns:
        Both sides of the product, [G, o, k_o + k_i] and [G, k_o + k_i, …].
    """
    dtype = torch.promote_types(pieces[0].dtype, outputs["root"].dtype)
    widths = [piece.shape[-1] for piece in pieces]
    left, right = outputs["rows"].to(dtype), inputs["rows"].to(dtype)[..., : sum(widths)]
    roots = outputs["root"].to(dtype), inputs["root"].to(dtype)
    ready = [piece.to(dtype) for piece in pieces]
    met = [p @ own.mT for p, own in zip(ready, right.split(widths, dim=-1), strict=True)]
    columns = added(met) @ roots[1].mT @ roots[1]  # ∇B_aᵀM_a, [G, o, k]
    seen = joined([left @ piece for piece in ready])
    crossed = roots[0].mT @ (roots[0] @ seen)  # M_g B_g ∇, [G, k, i]
    inner = crossed @ right.mT @ roots[1].mT @ roots[1]  # [G, k, k]
    crossed = torch.baddbmm(crossed, inner, right, alpha=-1)  # M_g B_g ∇ J_a
    return torch.cat([left.mT, columns], dim=-1), torch.cat([crossed, right], dim=-2)


def added(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of one tensor or two."""
    return tensors[0] if len(tensors) == 1 else tensors[0] + tensors[1]


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Columns beside columns."""
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors], dim=-1)


def precondition_side(parts: Parts, grad: Tensor, on_left: bool) -> Tensor:
    """J ∇ or ∇ J of a gradient [G, o, i], with the factor of one side, as in `precondition`."""
    dtype = torch.promote_types(grad.dtype, parts["root"].dtype)
    grad, rows, root = grad.to(dtype), parts["rows"].to(dtype), parts["root"].to(dtype)
    if on_left:
        return subtract(grad, rows.mT, root.mT @ (root @ (rows @ grad)))
    return subtract(grad, grad @ rows.mT @ root.mT @ root, rows)


def subtract(grad: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """∇ - left·right, with nothing of its size but the result."""
    if len(grad) == 1:
        return torch.addmm(grad[0], left[0], right[0], alpha=-1)[None]
    return torch.baddbmm(grad, left, right, alpha=-1)


def precondition_block(outputs: Parts, inputs: Parts, grad: Tensor, block: Block) -> Blockwise:
    """The block [1, o', i'] of J_g ∇ J_a that belongs to a block of ∇, as in `precondition`.

    Products with the rows of a side cross the workers that hold other parts of that side: k_g×i'
    numbers of outputs, o'×k_a and k_g×k_a of inputs. The gradient itself stays where it is.
    """
    dtype = torch.promote_types(grad.dtype, outputs["root"].dtype)
    grad = grad.to(dtype)
    left = rows_of(outputs["rows"].to(dtype), block)  # [1, k, o']
    right = columns_of(inputs["rows"].to(dtype), block)  # [1, k, i']
    roots = outputs["root"].to(dtype), inputs["root"].to(dtype)
    sums = counted(right, block).mT
    shared = yield Shares(outputs={"crossed": left @ grad}, inputs={"columns": grad @ sums})
    columns = shared["columns"] @ roots[1].mT @ roots[1]  # ∇B_aᵀM_a, [1, o', k]
    crossed = roots[0].mT @ (roots[0] @ shared["crossed"])  # M_g B_g ∇, [1, k, i']
    shared = yield Shares(inputs={"inner": crossed @ sums})
    inner = shared["inner"] @ roots[1].mT @ roots[1]
    crossed = torch.baddbmm(crossed, inner, right, alpha=-1)
    update = torch.baddbmm(grad, left.mT, crossed, alpha=-1)
    return torch.baddbmm(update, columns, right, alpha=-1)
