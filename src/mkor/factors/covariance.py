"""A covariance kept as a moving average, and what solves with it: its eigenpairs or an inverse.

The average starts from nothing. S sums γᵗ⁻ˢ(1-γ)Cₛ over the updates s, and w, its mass, sums the
weights γᵗ⁻ˢ(1-γ), so that S/w is a weighted mean of what was seen: the first update gives the plain
covariance, and no identity is mixed in. Damping is added when solving and never enters S.

Nothing here waits for the device but `eigh`, which torch checks on the host.

Symbols: S sum, w mass, γ decay, λ damping. Shapes: G stack, d side.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mkor.linalg import STRIPE

LinAlgError: type[Exception] = torch.linalg.LinAlgError  # type: ignore[attr-defined]


def usable(moment: Tensor, gain: Tensor) -> Tensor:
    """Whether a moment is finite, before and after it is multiplied by `gain`, [G].

    A sum of outer products that isn't finite anywhere isn't so on its diagonal.

    Args:
        moment: [G, d, d].
        gain: [G] or [1].
    """
    size = moment.diagonal(dim1=-2, dim2=-1).sum(dim=-1)  # [G], nan where any is
    return torch.isfinite(size) & torch.isfinite(size * gain)


def average_(
    total: Tensor, mass: Tensor, moment: Tensor, gain: Tensor, decay: float, taken: Tensor
) -> None:
    """In place S ← γS + (1-γ)·gain·M and w ← γw + (1-γ) where `taken`; no other bit changes.

    Args:
        total: S, [G, d, d].
        mass: w, [G].
        moment: M, [G, d, d]; may hold anything where it isn't taken.
        gain: Makes a covariance of the moment, [G] or [1].
        decay: γ.
        taken: [G].
    """
    dtype = torch.promote_types(moment.dtype, total.dtype)
    keep = torch.ones_like(mass, dtype=dtype).masked_fill_(taken, decay)  # [G]
    mass.copy_(keep * mass + (1 - keep))
    part, keep = ((1 - keep) * gain.to(dtype))[:, None, None], keep[:, None, None]
    # In bands, since a temporary as large as M costs more than the arithmetic.
    for new, old in zip(moment.split(STRIPE, dim=1), total.split(STRIPE, dim=1), strict=True):
        added = new.to(dtype) * part
        added.masked_fill_(~taken[:, None, None], 0)  # zero times what isn't finite isn't zero
        torch.addcmul(added, old, keep, out=old)


def bounded(
    total: Tensor,
    mass: Tensor,
    moment: Tensor,
    gain: Tensor,
    decay: float,
    damping: float,
    room: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The gain with which a batch adds a bounded part to the trace of S/w + λI, and where it does.

    A batch of numbers far beyond the usual would stay in the average for as long as it takes to
    forget it, log(size)/log(1/γ) updates, and an inverse that follows S by small corrections may
    not find back at all.

    Args:
        total: S, [G, d, d].
        mass: w, [G]; where it is 0 there is nothing to compare with.
        moment: M, [G, d, d].
        gain: Makes a covariance of the moment, [1].
        decay: γ.
        damping: λ.
        room: What a batch may add, in parts of the trace; 1 doubles it.

    Returns:
        The gain and where it was lowered, [G] each.
    """
    size = moment.diagonal(dim1=-2, dim2=-1).mean(dim=-1) * gain  # tr(gain·M)/d, [G]
    limit = room * (mean_eigenvalue(total, mass, size.dtype) + damping) / (1 - decay)
    high = (mass > 0) & (size > limit)  # not where it isn't a number
    return torch.where(high, gain * (limit / size), gain), high


def replace_(old: Tensor, new: Tensor, where: Tensor) -> None:
    """In place `old ← new` for the matrices or vectors of the stack named by `where`, [G]."""
    mask = where.view(-1, *[1] * (old.ndim - 1))
    torch.where(mask, new.to(old.dtype), old, out=old)


def identity_(matrix: Tensor, where: Tensor) -> None:
    """In place `matrix ← I` for the matrices named by `where`, [G]."""
    matrix.masked_fill_(where[:, None, None], 0)
    matrix.diagonal(dim1=-2, dim2=-1).masked_fill_(where[:, None], 1)


def eigen(total: Tensor, mass: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues and eigenvectors of S/w.

    Args:
        total: S, [G, d, d].
        mass: w, [G].
        dtype: What to compute in, float32 or float64.

    Returns:
        Eigenvalues [G, d], at least 0; eigenvectors as columns [G, d, d]; whether both are finite,
        [G].
    """
    values, vectors = decompose(total.to(dtype))
    values = values / mass.to(dtype)[:, None]
    size = torch.linalg.vector_norm(vectors, dim=(-2, -1))
    sound = torch.isfinite(values).all(dim=-1) & torch.isfinite(size)
    return values.clamp_min(0), vectors, sound


def decompose(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """`eigh` of a stack; where it doesn't converge, once more in float64 for each matrix alone."""
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except LinAlgError:
        pairs = [second_try(each) for each in matrix]
        values = torch.stack([pair[0] for pair in pairs])
        vectors = torch.stack([pair[1] for pair in pairs])
    return values, vectors


def second_try(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """`eigh` of one matrix [d, d] in float64 with a jitter of its rounding; nan if that fails too.

    The jitter splits eigenvalues that coincide, which is what keeps the iteration from converging.
    """
    wide = matrix.double()
    jitter = torch.finfo(matrix.dtype).eps * wide.diagonal().amax()
    spread = torch.linspace(0, 1, len(wide), dtype=wide.dtype, device=wide.device)  # [d]
    try:
        values, vectors = torch.linalg.eigh(wide + torch.diag(jitter * spread))
    except LinAlgError:
        values = torch.full_like(matrix[0], math.nan)
        vectors = torch.full_like(matrix, math.nan)
    return values.to(matrix.dtype), vectors.to(matrix.dtype)


def inverse(
    total: Tensor, mass: Tensor, damping: Tensor | float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(S/w + λI)⁻¹ by Cholesky.

    Args:
        total: S, [G, d, d].
        mass: w, [G].
        damping: λ, [G] or a number.
        dtype: What to compute in, float32 or float64.

    Returns:
        The inverse [G, d, d], and whether it could be computed, [G].
    """
    matrix = total.to(dtype, copy=True).div_(mass.to(dtype)[:, None, None])
    side = matrix.shape[-1]
    kept, computed = (torch.finfo(each).eps for each in (total.dtype, dtype))
    rounding = max(kept * side**0.5, 2 * computed * side)  # of storing S, and of Cholesky
    floor = matrix.diagonal(dim1=-2, dim2=-1).amax(dim=-1) * rounding  # [G]
    root, failed = damped_root(matrix, torch.zeros_like(floor).add_(damping), floor)
    identity_(root, failed)  # a zero on its diagonal would raise
    out = torch.cholesky_inverse(root)
    size = torch.linalg.vector_norm(out, dim=(-2, -1))
    return out, ~failed & torch.isfinite(size)


def damped_root(matrix: Tensor, damping: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """The Cholesky factor of M + λI, with more damping where rounding has eaten λ.

    No squared pivot of a positive semidefinite M plus λI is below λ. Where one is, or there is no
    factor, `floor` is added as well and the factor is computed again; elsewhere it is the same.

    Args:
        matrix: M, [G, d, d]; its diagonal is changed.
        damping: λ, [G].
        floor: What rounding may have changed of an eigenvalue, [G].

    Returns:
        The lower factor [G, d, d], and whether it failed, [G].
    """
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)  # [G, d], a view
    diagonal.add_(damping[:, None])
    root, info = torch.linalg.cholesky_ex(matrix)
    least = root.diagonal(dim1=-2, dim2=-1).square().amin(dim=-1)  # [G]
    held = (info == 0) & (least > damping / 2)
    diagonal.add_(torch.where(held, 0, floor)[:, None])
    root, info = torch.linalg.cholesky_ex(matrix)
    return root, info != 0


def mean_eigenvalue(total: Tensor, mass: Tensor, dtype: torch.dtype) -> Tensor:
    """tr(S/w)/d, [G]; 0 where nothing was seen."""
    side = total.shape[-1]
    mean = (total.diagonal(dim1=-2, dim2=-1).to(dtype) / side).sum(dim=-1)  # [G]
    return torch.where(mass > 0, mean / mass.to(dtype), 0)


def split_damping(damping: float, outputs: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """λ as one damping a factor, √λ/π for G and √λ·π for A, so that their product is λ.

    π² = (tr A/d_A)/(tr G/d_G) damps each factor in proportion to its own eigenvalues (Martens and
    Grosse 2015, section 6.3). π = 1 where either is zero.

    Args:
        damping: λ.
        outputs: tr G/d_G, [G].
        inputs: tr A/d_A, [G].

    Returns:
        The dampings of G and of A, [G] each.
    """
    balance = inputs.sqrt() / outputs.sqrt()  # π; the ratio of the squares could overflow
    balance = torch.where((balance > 0) & torch.isfinite(balance), balance, 1)
    return damping**0.5 / balance, damping**0.5 * balance
