"""Symmetric matrices as the half that tells the rest.

With p = ⌈d/2⌉ and q = ⌊d/2⌋ a matrix [d, d] has the blocks A [p, p], B [p, q] and C [q, q]. B is
kept whole; the upper triangle of A and the lower one of C fill one rectangle. That takes d(d+1)/2
numbers, no table of places, and no look at the values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def length(side: int) -> int:
    """Numbers that a matrix of this side is packed into."""
    return side * (side + 1) // 2


def pack(matrix: Tensor) -> Tensor:
    """Symmetric matrices [G, d, d] as vectors [G, d(d+1)/2]; the lower triangle isn't read."""
    side = matrix.shape[-1]
    half = (side + 1) // 2
    above, below = matrix[:, :half, :half].triu(), matrix[:, half:, half:].mT.tril()
    # A has its diagonal in the rectangle's first column after C's, or C is a row lower.
    both = F.pad(above, (1 - side % 2, 0)) + F.pad(below, (0, 1, side % 2, 0))
    return torch.cat([matrix[:, :half, half:].flatten(1), both.flatten(1)], dim=1)


def unpack(packed: Tensor, side: int) -> Tensor:
    """The matrices [G, d, d] that `pack` was given."""
    half = (side + 1) // 2
    cross, both = packed.split([half * (side - half), length(side) - half * (side - half)], dim=1)
    cross = cross.view(len(packed), half, side - half)
    both = both.view(len(packed), half, side + 1 - half)
    odd = side % 2
    above = both[..., 1 - odd :].triu()  # [G, p, p]
    below = both[:, odd:, : side - half].tril()  # [G, q, q]
    matrix = packed.new_empty(len(packed), side, side)
    matrix[:, :half, :half] = above.add_(above.triu(1).mT)
    matrix[:, half:, half:] = below.add_(below.tril(-1).mT)
    matrix[:, :half, half:] = cross
    matrix[:, half:, :half] = cross.mT
    return matrix
