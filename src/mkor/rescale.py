"""Scaling a preconditioned gradient back to a known size: pure functions.

Shapes: G stack, o output side, i input side (the bias is one more column, so weight and bias are
rescaled jointly).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mkor.linalg import frobenius, norm_of

Sizes = tuple[Tensor, Tensor]
"""Frobenius norms of an update and of its gradient, [G, 1, 1] each."""

Sides = tuple[int, int]
"""Numbers of outputs and inputs of a matrix, (o, i)."""

Factor = Callable[[Tensor, Tensor, Sides], Tensor]
"""What an update is multiplied by, [G, 1, 1], by its norm, its gradient's, and its sides."""

USUAL_INPUTS = 128
"""Inputs of a matrix whose updates `fan_in_rms` gives a root mean square of 1."""


def match_norm(size: Tensor, wanted: Tensor, sides: Sides) -> Tensor:
    """Gives an update the Frobenius norm of its gradient, per matrix (Algorithm 1, line 10)."""
    return wanted / size


def keep_size(size: Tensor, wanted: Tensor, sides: Sides) -> Tensor:
    """Leaves an update as large as it is."""
    return torch.ones_like(size)


def unit_rms(size: Tensor, wanted: Tensor, sides: Sides) -> Tensor:
    """Gives an update a root mean square of 1, so that a learning rate is a step's size."""
    return math.sqrt(sides[0] * sides[1]) / size


def fan_in_rms(size: Tensor, wanted: Tensor, sides: Sides) -> Tensor:
    """Gives an update a root mean square of √(128/i): that of `unit_rms` at i = 128.

    What a step adds to an output is then about the same however many inputs it is a sum over, as
    where Muon scales an orthogonal update by √max(1, o/i) and o ≥ i; so a learning rate fits
    networks of other widths too.
    """
    return math.sqrt(sides[0] * USUAL_INPUTS) / size


SIZED: dict[str | None, Factor] = {"rms": unit_rms, "fan_in": fan_in_rms}
"""Factors that give an update a size of its own, whatever the gradient's, by the name."""

RESCALE: dict[str | None, Factor] = {"gradient": match_norm, None: keep_size, **SIZED}
"""How a preconditioned gradient is scaled, by the name of the option `rescale`."""


def rescaled(
    update: Tensor, grad: Tensor, factor: Factor, sides: Sides, sizes: Sizes | None = None
) -> Tensor:
    """Scale an update, per matrix.

    A zero gradient stays zero. Where the update is not finite, or is zero although the gradient
    isn't and its size matters, the gradient takes its place: a broken factor costs the
    preconditioning of a step, never the step.

    Args:
        update: ΔW, [G, o, i].
        grad: What was preconditioned, [G, o, i], same dtype.
        factor: By what, one of `RESCALE`.
        sides: o and i of a whole matrix.
        sizes: Their norms, where these are blocks of the matrices.

    Returns:
        A tensor [G, o, i]; may reuse the memory of `update`.
    """
    size, other = sizes or (frobenius(update), frobenius(grad))
    # Comparisons with not-a-number are false; an infinite size has the factor 0.
    sound = (size < math.inf) & (factor(size, other, sides) < math.inf)
    chosen = torch.where(sound, update, grad, out=update)
    return chosen.mul_(finite(factor(torch.where(sound, size, other), other, sides)))


def rescale_(pieces: Sequence[Tensor], factor: Factor, sides: Sides, other: Tensor | None) -> None:
    """Scale in place an update that is finite, in pieces [G, o, …] of its columns.

    Args:
        pieces: ΔW.
        factor: By what, one of `RESCALE`.
        sides: o and i of the whole matrix.
        other: The norm of what was preconditioned, [G, 1, 1]; None where the factor ignores it.
    """
    size = norm_of(pieces)
    by = finite(factor(size, size if other is None else other, sides))
    for piece in pieces:
        piece.mul_(by)


def finite(factor: Tensor) -> Tensor:
    """A factor, 1 where it is not finite."""
    return torch.where(factor < math.inf, factor, 1)


def kl_factor(products: Tensor, limit: float) -> Tensor:
    """The factor ν = min(1, √(κ/|Σ lr²⟨V, ∇⟩|)) that bounds a step's change of the model.

    The sum approximates the KL divergence that the step causes (Ba, Grosse and Martens 2017). Where
    it is zero or not finite, nothing is scaled.

    Args:
        products: lr²⟨V, ∇⟩ of every layer, [n].
        limit: κ.

    Returns:
        A scalar.
    """
    ratio = (limit / products.sum().abs()).sqrt()
    return torch.where(ratio < 1, ratio, 1.0)
