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

Symbols: γ decay, ζ blend, ε limit, μ damping. Shapes: G stack, d side, r vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mkor.linalg import add_low_rank_, apply_factor


@dataclass(frozen=True)
class Statistic:
    """An update's vectors in a range where no product of them overflows: VVᵀ = UUᵀ/floor."""

    units: Tensor  # U, [G, d, r], entries of at most 1
    floor: Tensor | float  # [G, 1, 1]
    finite: Tensor  # [G], whether V was


@dataclass(frozen=True)
class Change:
    """An update of J that has not been written yet: keep·J + shift·I + sign·WWᵀ."""

    diagonal: Tensor  # of J, [G, d]; read once, since every entry lies in a page of its own
    keep: Tensor  # [G]
    shift: Tensor  # [G]
    columns: Tensor  # W, [G, d, r]
    sign: float
    blended: Tensor  # [G], whether the stabiliser acted


def identity(stack: int, side: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The starting inverse, one identity per matrix of the stack, [G, d, d]."""
    return torch.eye(side, dtype=dtype, device=device).repeat(stack, 1, 1)


def prepare(vectors: Tensor, damping: float | None) -> Statistic:
    """Put V into range; with a damping μ, scale it so that tr(VVᵀ) = 1/μ.

    The identity then weighs μ times the trace, which makes an update blind to the scale of the
    loss, to its reduction and to loss scaling. Zero vectors stay zero.

    Args:
        vectors: V, [G, d, r].
        damping: μ, or None to take V as it is.
    """
    least = torch.finfo(vectors.dtype).tiny
    size = torch.linalg.vector_norm(vectors, ord=math.inf, dim=(-2, -1), keepdim=True)  # [G, 1, 1]
    units = vectors / size.clamp_min(least)
    finite = torch.isfinite(size[:, 0, 0])
    if damping is None:
        zero_safe = torch.where(size > 0, size, 1)
        return Statistic(units, zero_safe.reciprocal().square().clamp_min(least), finite)
    length = torch.linalg.vector_norm(units, dim=(-2, -1), keepdim=True)
    return Statistic(units / length.clamp_min(1), damping, finite)


def diagonal_of(inverse: Tensor, like: Tensor) -> Tensor:
    """A copy of the diagonal in the dtype of `like`, [G, d]."""
    return inverse.diagonal(dim1=-2, dim2=-1).to(like.dtype, copy=True)


def stabiliser(diagonal: Tensor, limit: float, blend: float) -> Tensor:
    """Weight w of J in J ← wJ + (1-w)I, [G]: ζ where ‖J‖ > ε or ‖J‖ < 1/ε, else 1.

    Algorithm 1, lines 5-6, with two additions: an inverse that vanishes is caught too, and w is at
    most ε/‖J‖. A fixed ζ ≥ γ could not hold the norm, since an update may grow J by 1/γ. The norm
    is max |J_ij|, which a positive definite matrix has on its diagonal, [G, d].
    """
    norm = diagonal.amax(dim=-1)
    weight = (limit / norm).clamp(max=blend)
    return torch.where((norm > limit) | (norm < 1 / limit), weight, 1.0)


def exact(inverse: Tensor, seen: Statistic, decay: float, limit: float, blend: float) -> Change:
    """Sherman-Morrison-Woodbury of L ← γL + (1-γ)VVᵀ on the stabilised Ĵ = wJ + (1-w)I.

    J⁺ = (1/γ)·[Ĵ - (1-γ)·ĴV(γI + (1-γ)VᵀĴV)⁻¹VᵀĴ].

    Args:
        inverse: J, [G, d, d].
        seen: V.
        decay: γ.
        limit: ε, the norm beyond which (or below whose reciprocal) J is blended with I.
        blend: ζ, the weight of J in that blend.
    """
    diagonal = diagonal_of(inverse, seen.units)
    weight = stabiliser(diagonal, limit, blend)  # [G]
    images = blended_images(inverse, seen.units, weight)  # ĴU, [G, d, r]
    floor = seen.floor * (decay / (1 - decay))
    columns = solve_gram(floor, seen.units, images) * decay**-0.5
    return Change(diagonal, weight / decay, (1 - weight) / decay, columns, -1.0, weight < 1)


def paper(inverse: Tensor, seen: Statistic, decay: float, limit: float, blend: float) -> Change:
    """Eq. 5/6 as printed on the stabilised Ĵ = wJ + (1-w)I, once per vector.

    J⁺ = γĴ + (1-γ)/(γ²(1 + γ(1-γ)vᵀĴv))·ĴvvᵀĴ. Not an inverse of eq. 3/4; kept for fidelity.
    """
    units = seen.units
    diagonal = diagonal_of(inverse, units)
    weight = stabiliser(diagonal, limit, blend)  # [G]
    images = blended_images(inverse, units, weight)  # [G, d, r]
    columns: list[Tensor] = []
    for j in range(units.shape[-1]):
        image = images[..., j : j + 1]  # Ĵu, [G, d, 1]
        along = (units[..., j : j + 1] * image).sum(dim=-2, keepdim=True)  # uᵀĴu, [G, 1, 1]
        gain = (1 - decay) / (decay**2 * (seen.floor + decay * (1 - decay) * along))
        columns = [column * decay**0.5 for column in columns] + [image * gain.sqrt()]
        images = decay * images + gain * image * (image.mT @ units)
    shrink = decay ** units.shape[-1]
    keep, shift = weight * shrink, (1 - weight) * shrink
    return Change(diagonal, keep, shift, torch.cat(columns, dim=-1), 1.0, weight < 1)


def reference(inverse: Tensor, seen: Statistic, decay: float, limit: float, blend: float) -> Change:
    """What the released code computes: B = ζJ + (1-ζ)I, J⁺ = B - BV(I + VᵀBV)⁻¹VᵀB.

    `decay` plays no part in it, as in that code. Where ‖J‖ > ε the result is made unsound, so that
    the guard resets the factor to I and the statistic is dropped.
    """
    del decay
    weight = torch.full_like(inverse[:, 0, 0], blend, dtype=seen.units.dtype)  # [G]
    images = blended_images(inverse, seen.units, weight)
    columns = solve_gram(seen.floor, seen.units, images)
    diagonal = diagonal_of(inverse, seen.units)
    over = (diagonal.amax(dim=-1) > limit)[:, None, None]
    columns = columns.masked_fill(over, torch.nan)
    return Change(diagonal, weight, 1 - weight, columns, -1.0, weight > 1)


def blended_images(inverse: Tensor, units: Tensor, weight: Tensor) -> Tensor:
    """(wJ + (1-w)I)U without forming the matrix, [G, d, r]."""
    return torch.lerp(units, apply_factor(inverse, units), weight[:, None, None])


def solve_gram(floor: Tensor | float, units: Tensor, images: Tensor) -> Tensor:
    """W with WWᵀ = P(floor·I + UᵀP)⁻¹Pᵀ for P = ĴU; not finite where that isn't positive."""
    gram = units.mT @ images  # [G, r, r]
    if gram.shape[-1] == 1:
        return images * (gram + floor).rsqrt()
    gram.diagonal(dim1=-2, dim2=-1).add_(floor if isinstance(floor, float) else floor[..., 0])
    root, info = torch.linalg.cholesky_ex(gram)
    columns: Tensor = torch.linalg.solve_triangular(root, images.mT, upper=False).mT  # [G, d, r]
    return columns.masked_fill((info != 0)[:, None, None], torch.nan)


def guard(change: Change, usable: Tensor, dtype: torch.dtype) -> tuple[Change, Tensor]:
    """Replace what would damage J: nothing changes where not `usable`, else I where J⁺ is unsound.

    J⁺ is unsound where it isn't finite, leaves the dtype's range or has a diagonal entry that
    isn't positive. All of it is read off the new diagonal, O(d·r), before J is touched.

    Args:
        change: The update that a rule proposes.
        usable: Where the statistic may change the factor, [G].
        dtype: The dtype of J.

    Returns:
        The update to write, and where it resets the factor to I, [G].
    """
    new = torch.addcmul(change.shift[:, None], change.diagonal, change.keep[:, None])  # [G, d]
    new = new.add_(change.columns.square().sum(dim=-1), alpha=change.sign)
    least, most = new.aminmax(dim=-1)  # not a number where any entry isn't
    sound = (least > 0) & (most < torch.finfo(dtype).max ** 0.5)  # [G]
    written, reset = usable & sound, usable & ~sound
    guarded = Change(
        change.diagonal,
        torch.where(written, change.keep, (~reset).to(new.dtype)),
        torch.where(written, change.shift, reset.to(new.dtype)),
        change.columns.masked_fill(~written[:, None, None], 0),
        change.sign,
        change.blended & written,
    )
    return guarded, reset


def write_(inverse: Tensor, change: Change) -> None:
    """Carry out a change in place, without a temporary of the matrix's size."""
    add_low_rank_(inverse, change.columns, change.sign, change.keep.to(inverse.dtype))
    inverse.diagonal(dim1=-2, dim2=-1).add_(change.shift[:, None].to(inverse.dtype))


RULES: dict[str, Callable[..., Change]] = {"exact": exact, "paper": paper, "reference": reference}
"""The rules by name."""
