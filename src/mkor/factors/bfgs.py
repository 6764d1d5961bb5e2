"""One side's inverse H kept by BFGS updates, from pairs (s, y) with y ≈ Bs for the B it inverts.

The update of the inverse that BFGS makes of B,

    H⁺ = H + ((sᵀy + yᵀHy)/(sᵀy)²)·ssᵀ − (Hy sᵀ + s yᵀH)/(sᵀy),

satisfies the secant equation H⁺y = s, and is positive definite when H is and sᵀy > 0. Damping a
pair makes sure of that. Neither changes when s and y are multiplied by the same number, so pairs
are brought into a range where no product of them overflows.

`inverse_update` reads H for Hy alone; what is written is safe by O(d) numbers that are known before
H is touched, and nothing synchronises with the host.

Shapes: G stack, d side; s and y are columns, [G, d, 1].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mkor.factors import dense
from mkor.linalg import add_low_rank_, apply_factor

SHARE = 0.2
"""Powell's constant: sᵀy is at least this part of yᵀHy after damping."""

FLAT = 1e-4
"""A pair with sᵀy below this times ‖s‖²·‖v‖, v the vector behind it, says nothing of B."""


@dataclass(frozen=True)
class Change:
    """An update of H that has not been written yet: keep·H + (1-keep)·I + ppᵀ − mmᵀ."""

    keep: Tensor  # 1, or 0 where H is reset to the identity, [G]
    plus: Tensor  # p, [G, d, 1]
    minus: Tensor  # m, [G, d, 1]
    written: Tensor  # where the pair is used, [G]


def dot(left: Tensor, right: Tensor) -> Tensor:
    """Inner products of columns, [G, 1, 1]."""
    return (left * right).sum(dim=-2, keepdim=True)


def length(column: Tensor) -> Tensor:
    """Euclidean length of columns, [G, 1, 1]."""
    size: Tensor = torch.linalg.vector_norm(column, dim=-2, keepdim=True)
    return size


def in_range(*columns: Tensor) -> list[Tensor]:
    """Columns divided by the largest entry among them, per matrix of the stack; zeros stay zero."""
    sizes = torch.cat([column.abs() for column in columns], dim=-1)  # [G, d, n]
    size = sizes.amax(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(sizes.dtype).tiny)
    return [column / size for column in columns]


def bounded(
    averages: tuple[Tensor, Tensor], pair: tuple[Tensor, Tensor], limit: float
) -> tuple[Tensor, Tensor]:
    """What a pair is multiplied by before it joins the averages, and where that isn't 1.

    Neither s nor y may be longer than `limit` times its average, so that one batch of a huge loss
    or input doesn't outweigh all others. Both take the same number: their ratio is the curvature.

    Args:
        averages: Of s and of y, [G, d]; an average that is zero sets no limit.
        pair: s and y, [G, d].
        limit: Largest ratio of lengths.

    Returns:
        The number, [G, 1], and where it is below 1, [G].
    """
    room = torch.ones_like(pair[0][:, 0])  # [G]
    for average, new in zip(averages, pair, strict=True):
        sizes = [torch.linalg.vector_norm(v, dim=-1) for v in (average, new)]
        ratio = limit * (sizes[0] / sizes[1])
        room = torch.where(ratio > 0, torch.minimum(room, ratio), room)
    return room[:, None], room < 1


def damp_by_inverse(s: Tensor, y: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    """Powell's damping of s: a mixture of s and Hy with sᵀy = 0.2·yᵀHy where it was below that.

    Args:
        s: [G, d, 1].
        y: [G, d, 1].
        image: Hy, [G, d, 1].

    Returns:
        The new s, and where it changed, [G].
    """
    along, curve = dot(s, y), dot(y, image)
    low = along < SHARE * curve  # so that curve > along
    weight = torch.where(low, (1 - SHARE) * curve / (curve - along), 1)
    return torch.lerp(image, s, weight), low[:, 0, 0]


def damp_by_level(s: Tensor, y: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """Powell's damping of y with B = I: a mixture of y and s with sᵀy = level·sᵀs at least.

    Args:
        s: [G, d, 1].
        y: [G, d, 1].
        level: Least curvature along s, between 0 and 1.

    Returns:
        The new y, and where it changed, [G].
    """
    along, square = dot(s, y), dot(s, s)
    low = along < level * square  # so that square > along
    weight = torch.where(low, (1 - level) * square / (square - along), 1)
    return torch.lerp(s, y, weight), low[:, 0, 0]


def tells(s: Tensor, y: Tensor, behind: Tensor) -> Tensor:
    """Whether the curvature along s is large enough to divide by it, [G].

    Args:
        s: [G, d, 1].
        y: [G, d, 1].
        behind: ‖v‖, the length of the mean vector that the pair comes from, [G].
    """
    told: Tensor = dot(s, y) > FLAT * dot(s, s) * behind[:, None, None]  # false where not a number
    return told[:, 0, 0]


def inverse_update(s: Tensor, y: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    """Columns p and m with H⁺ = H + ppᵀ − mmᵀ, which keeps H symmetric to the last bit.

    H⁺ − H is −(c sᵀ + s cᵀ)/(sᵀy) with c = Hy − ½(1 + yᵀHy/sᵀy)s. Of s and c, scaled to the same
    length, the difference and the sum are p and m.

    Args:
        s: [G, d, 1].
        y: [G, d, 1], with sᵀy > 0.
        image: Hy, [G, d, 1].
    """
    along = dot(s, y)
    cross = image - (1 + dot(y, image) / along) / 2 * s  # c
    balance = length(cross).clamp_min(torch.finfo(s.dtype).tiny) / length(s)
    half = (2 * along).rsqrt()
    cross, step = cross * (half * balance.rsqrt()), s * (half * balance.sqrt())
    return cross - step, cross + step


def guard(inverse: Tensor, columns: tuple[Tensor, Tensor], use: Tensor, reset: Tensor) -> Change:
    """The change to write: nothing where not `use` or where it would damage H, I where `reset`.

    H⁺ is damaged where it isn't finite, leaves the range of its dtype or has a diagonal entry that
    isn't positive. All of that is read off the new diagonal, O(d), before H is touched.

    Args:
        inverse: H, [G, d, d].
        columns: p and m, [G, d, 1] each.
        use: Where the pair may change H, [G].
        reset: Where H is to become the identity, [G].
    """
    plus, minus = columns
    diagonal = dense.diagonal_of(inverse, plus)  # [G, d]
    diagonal = diagonal + plus[..., 0].square() - minus[..., 0].square()
    least, most = diagonal.aminmax(dim=-1)  # not a number where any entry isn't
    sound = (least > 0) & (most < torch.finfo(inverse.dtype).max ** 0.5)
    written = use & sound & ~reset  # [G]
    idle = ~written[:, None, None]
    plus, minus = plus.masked_fill(idle, 0), minus.masked_fill(idle, 0)
    return Change((~reset).to(plus.dtype), plus, minus, written)


def write_(inverse: Tensor, change: Change) -> None:
    """Carry out a change in place, without a temporary of the matrix's size."""
    keep = change.keep.to(inverse.dtype)  # [G]
    add_low_rank_(inverse, change.plus, 1.0, keep)
    inverse.diagonal(dim1=-2, dim2=-1).add_(1 - keep[:, None])
    add_low_rank_(inverse, change.minus, -1.0)


def absorb_(inverse: Tensor, s: Tensor, y: Tensor, use: Tensor) -> tuple[Tensor, Tensor]:
    """Update H in place by a pair; where H isn't positive definite any more it becomes I.

    Rounding can cost H its definiteness, which no later pair would bring back. It shows as a
    negative yᵀHy.

    Args:
        inverse: H, [G, d, d].
        s: [G, d, 1].
        y: [G, d, 1].
        use: Where the pair may be used, [G].

    Returns:
        Where it was used and where H was reset, [G] each.
    """
    image = apply_factor(inverse, y)
    broken = use & (dot(y, image) < 0)[:, 0, 0]
    change = guard(inverse, inverse_update(s, y, image), use, broken)
    write_(inverse, change)
    return change.written, broken
