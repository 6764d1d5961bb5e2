"""A dense inverse factor J [d, d] kept up to date by low-rank updates, in three rules.

The covariance that J inverts is a moving average, L ← γL + (1-γ)VVᵀ (eq. 3 and 4 of the paper,
V the statistic's r vectors). Every rule here has the same form,

    J ← keep·J + shift·I + sign·WWᵀ,

with scalars `keep`, `shift` and a thin W [d, r] that are known before the matrix is touched. So an
update reads J once for JV and writes it once, its safety is decided on O(d) numbers, and nothing
of it synchronises with the host.

| rule      | what it computes |
| --------- | ---------------- |
| exact     | the Sherman-Morrison-Woodbury inverse of the moving average |
| paper     | eq. 5/6 as printed: sign and powers of γ differ, it amplifies what it should damp |
| reference | what the authors' released code computes: unit-weight update of ζJ + (1-ζ)I |

Symbols: γ decay, ζ blend, ε limit. Shapes: G stack, d side, r vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mkor.linalg import add_low_rank_, apply_factor


@dataclass(frozen=True)
class Change:
    """An update of J that has not been written yet: keep·J + shift·I + sign·WWᵀ."""

    keep: Tensor  # [G]
    shift: Tensor  # [G]
    columns: Tensor  # W, [G, d, r]
    sign: float
    blended: Tensor  # [G], whether the stabiliser acted
    reset: Tensor  # [G], whether the result is the identity


def identity(stack: int, side: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The starting inverse, one identity per matrix of the stack, [G, d, d]."""
    return torch.eye(side, dtype=dtype, device=device).repeat(stack, 1, 1)


def normalise(vectors: Tensor, damping: float) -> Tensor:
    """Scale V so that tr(VVᵀ) = 1/damping: the identity then weighs `damping` times the trace.

    Makes an update blind to the scale of the loss, to its reduction and to loss scaling. Zero
    vectors stay zero.

    Args:
        vectors: [G, d, r].
        damping: μ, the identity's weight relative to the trace.
    """
    unit, _ = unit_size(vectors)
    length = torch.linalg.vector_norm(unit, dim=(-2, -1), keepdim=True)
    scaled: Tensor = unit / (damping**0.5 * torch.where(length > 0, length, 1))
    return scaled


def unit_size(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """V/s with entries of at most 1, and 1/s² [G, 1, 1]: squares of large raw vectors overflow."""
    size = vectors.abs().amax(dim=(-2, -1), keepdim=True)  # [G, 1, 1]
    size = torch.where(size > 0, size, 1)
    least = torch.finfo(size.dtype).tiny
    return vectors / size, size.reciprocal().square().clamp_min(least)


def largest(inverse: Tensor) -> Tensor:
    """The infinity norm max |J_ij|, [G]: for a positive definite matrix it is on the diagonal."""
    norm = inverse.diagonal(dim1=-2, dim2=-1).amax(dim=-1)
    return norm.to(torch.promote_types(norm.dtype, torch.float32))


def stabiliser(inverse: Tensor, limit: float, blend: float) -> Tensor:
    """Weight w of J in J ← wJ + (1-w)I, [G]: ζ where ‖J‖ > ε or ‖J‖ < 1/ε, else 1.

    Algorithm 1, lines 5-6, with two additions: an inverse that vanishes is caught too, and w is at
    most ε/‖J‖. A fixed ζ ≥ γ could not hold the norm, since an update may grow J by 1/γ.
    """
    norm = largest(inverse)
    weight = (limit / norm).clamp(max=blend)
    return torch.where((norm > limit) | (norm < 1 / limit), weight, 1.0)


def exact(inverse: Tensor, vectors: Tensor, decay: float, limit: float, blend: float) -> Change:
    """Sherman-Morrison-Woodbury of L ← γL + (1-γ)VVᵀ on the stabilised Ĵ = wJ + (1-w)I.

    J⁺ = (1/γ)·[Ĵ - (1-γ)·ĴV(γI + (1-γ)VᵀĴV)⁻¹VᵀĴ].

    Args:
        inverse: J, [G, d, d].
        vectors: V, [G, d, r].
        decay: γ.
        limit: ε, the norm beyond which (or below whose reciprocal) J is blended with I.
        blend: ζ, the weight of J in that blend.
    """
    weight = stabiliser(inverse, limit, blend).to(vectors.dtype)  # [G]
    vectors, floor = unit_size(vectors)
    images = blended_images(inverse, vectors, weight)  # ĴV, [G, d, r]
    columns = solve_gram(decay * floor, 1 - decay, vectors, images)
    columns = columns * ((1 - decay) / decay) ** 0.5
    return Change(weight / decay, (1 - weight) / decay, columns, -1.0, weight < 1, weight < 0)


def paper(inverse: Tensor, vectors: Tensor, decay: float, limit: float, blend: float) -> Change:
    """Eq. 5/6 as printed on the stabilised Ĵ = wJ + (1-w)I, once per vector.

    J⁺ = γĴ + (1-γ)/(γ²(1 + γ(1-γ)vᵀĴv))·ĴvvᵀĴ. Not an inverse of eq. 3/4; kept for fidelity.
    """
    weight = stabiliser(inverse, limit, blend).to(vectors.dtype)  # [G]
    vectors, floor = unit_size(vectors)
    images = blended_images(inverse, vectors, weight)  # [G, d, r]
    columns: list[Tensor] = []
    for j in range(vectors.shape[-1]):
        image = images[..., j : j + 1]  # Ĵv, [G, d, 1]
        along = (vectors[..., j : j + 1] * image).sum(dim=-2, keepdim=True)  # vᵀĴv, [G, 1, 1]
        gain = (1 - decay) / (decay**2 * (floor + decay * (1 - decay) * along))
        columns = [column * decay**0.5 for column in columns] + [image * gain.sqrt()]
        images = decay * images + gain * image * (image.mT @ vectors)
    shrink = decay ** vectors.shape[-1]
    keep, shift = weight * shrink, (1 - weight) * shrink
    return Change(keep, shift, torch.cat(columns, dim=-1), 1.0, weight < 1, weight < 0)


def reference(inverse: Tensor, vectors: Tensor, decay: float, limit: float, blend: float) -> Change:
    """What the released code computes: B = ζJ + (1-ζ)I, J⁺ = B - BV(I + VᵀBV)⁻¹VᵀB.

    `decay` plays no part in it, as in that code. Where ‖J‖ > ε the factor becomes I and the
    statistic is dropped.
    """
    del decay
    weight = torch.full_like(inverse[:, 0, 0], blend, dtype=vectors.dtype)  # [G]
    vectors, floor = unit_size(vectors)
    images = blended_images(inverse, vectors, weight)
    columns = solve_gram(floor, 1.0, vectors, images)
    change = Change(weight, 1 - weight, columns, -1.0, weight < 0, weight < 0)
    return restart(change, largest(inverse) > limit)


def restart(change: Change, where: Tensor) -> Change:
    """Make the result of a change the identity where told, [G]."""
    return Change(
        change.keep.masked_fill(where, 0),
        change.shift.masked_fill(where, 1),
        change.columns.masked_fill(where[:, None, None], 0),
        change.sign,
        change.blended & ~where,
        change.reset | where,
    )


def blended_images(inverse: Tensor, vectors: Tensor, weight: Tensor) -> Tensor:
    """(wJ + (1-w)I)V without forming the matrix, [G, d, r]."""
    share = weight[:, None, None]
    return share * apply_factor(inverse, vectors) + (1 - share) * vectors


def solve_gram(floor: Tensor, scale: float, vectors: Tensor, images: Tensor) -> Tensor:
    """W with WWᵀ = U(floor·I + scale·VᵀU)⁻¹Uᵀ for U = ĴV; not finite where that isn't positive.

    `floor` is [G, 1, 1].
    """
    gram = scale * (vectors.mT @ images)  # [G, r, r]
    gram.diagonal(dim1=-2, dim2=-1).add_(floor[..., 0])
    root, info = torch.linalg.cholesky_ex(gram)
    columns: Tensor = torch.linalg.solve_triangular(root, images.mT, upper=False).mT  # [G, d, r]
    return columns.masked_fill((info != 0)[:, None, None], torch.nan)


def guard(inverse: Tensor, change: Change, usable: Tensor) -> Change:
    """Replace what would damage J: nothing changes where not `usable`, else I where J⁺ is unsound.

    J⁺ is unsound where it isn't finite, leaves the dtype's range or has a diagonal entry that
    isn't positive. All of it is read off the new diagonal, O(d·r), before J is touched.

    Args:
        inverse: J, [G, d, d].
        change: The update that a rule proposes.
        usable: Whether the statistic is finite and present, [G].
    """
    old = inverse.diagonal(dim1=-2, dim2=-1).to(change.columns.dtype)  # [G, d]
    new = change.keep[:, None] * old + change.shift[:, None]
    new = new + change.sign * change.columns.square().sum(dim=-1)
    ceiling = torch.finfo(inverse.dtype).max ** 0.5
    sound = ((new > 0) & (new < ceiling)).all(dim=-1)  # False for a value that is not a number
    usual = Change(
        torch.where(usable, change.keep, 1),
        torch.where(usable, change.shift, 0),
        change.columns.masked_fill(~usable[:, None, None], 0),
        change.sign,
        change.blended & usable,
        change.reset & usable,
    )
    return restart(usual, usable & ~sound)


def write_(inverse: Tensor, change: Change) -> None:
    """Carry out a change in place, without a temporary of the matrix's size."""
    inverse.mul_(change.keep[:, None, None].to(inverse.dtype))
    inverse.diagonal(dim1=-2, dim2=-1).add_(change.shift[:, None].to(inverse.dtype))
    add_low_rank_(inverse, change.columns, change.sign)


RULES: dict[str, Callable[..., Change]] = {"exact": exact, "paper": paper, "reference": reference}
"""The rules by name."""
