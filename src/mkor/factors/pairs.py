"""An inverse H that is never formed: the identity updated by the last k pairs (s, y), L-BFGS.

BFGS updates of I by the pairs 1, ..., k, oldest first, have the compact form (Byrd, Nocedal and
Schnabel, 1994, eq. 3.1)

    H = I + [S Y] [R⁻ᵀ(D + YᵀY)R⁻¹  −R⁻ᵀ] [Sᵀ]
                  [      −R⁻¹          0 ] [Yᵀ],

where S and Y hold the pairs as columns, R is the upper triangle of SᵀY and D its diagonal. Applied
to a gradient it costs four products with k·d numbers and a triangular solve of side k, where the
two-loop recursion would take 4k small steps one after the other.

The memory keeps pairs as rows, newest last. A place that is still empty holds zeros, and is
recognised by sᵀy = 0: no counter is needed, and every matrix of a stack may have taken another
number of pairs.

Shapes: G stack, k places, d side.
"""

from __future__ import annotations

import torch
from torch import Tensor


def product(steps: Tensor, changes: Tensor, columns: Tensor) -> Tensor:
    """The product H·columns, [G, d, n].

    Args:
        steps: The s of the pairs, oldest first, [G, k, d].
        changes: Their y, [G, k, d].
        columns: [G, d, n], same dtype.
    """
    crossed = (steps @ changes.mT).triu()  # R, [G, k, k]
    along = crossed.diagonal(dim1=-2, dim2=-1)  # D, [G, k]
    empty = torch.diag_embed((along == 0).to(along.dtype))
    middle = changes @ changes.mT + torch.diag_embed(along)  # YᵀY + D
    solved = torch.linalg.solve_triangular(crossed + empty, steps @ columns, upper=True)
    inner = middle @ solved - changes @ columns  # [G, k, n]
    outer = torch.linalg.solve_triangular((crossed + empty).mT, inner, upper=False)
    return torch.baddbmm(columns, steps.mT, outer).baddbmm_(changes.mT, solved, alpha=-1)


def absorb_(
    steps: Tensor, changes: Tensor, s: Tensor, y: Tensor, use: Tensor
) -> tuple[Tensor, Tensor]:
    """Add a pair last and drop the oldest, in place; the memory of an unsound H is emptied.

    Args:
        steps: [G, k, d].
        changes: [G, k, d].
        s: [G, d, 1].
        y: [G, d, 1].
        use: Where the pair may be used, [G].

    Returns:
        Where it was used and where the memory was emptied, [G] each.
    """
    image = product(steps.to(y.dtype), changes.to(y.dtype), y)
    broken = use & ((y * image).sum(dim=-2) < 0)[:, 0]  # not positive definite, by rounding
    rows = [column.mT.to(steps.dtype) for column in (s, y)]  # [G, 1, d]
    # Rounding to a narrow dtype can turn the sign of sᵀy.
    positive = ((rows[0].to(y.dtype) * rows[1].to(y.dtype)).sum(dim=-1) > 0)[:, 0]
    used = use & positive & ~broken  # [G]
    for memory, row in zip((steps, changes), rows, strict=True):
        moved = torch.cat([memory[:, 1:], row], dim=1)
        memory.copy_(torch.where(used[:, None, None], moved, memory))
        memory.masked_fill_(broken[:, None, None], 0)
    return used, broken
