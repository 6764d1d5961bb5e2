"""Scaling a preconditioned gradient back to a known size: pure functions.

Shapes: G stack, o output side, i input side (the bias is one more column, so weight and bias are
rescaled jointly).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Sizes = tuple[Tensor, Tensor]
"""Frobenius norms of an update and of its gradient, [G, 1, 1] each."""

Sides = tuple[int, int]
"""Numbers of outputs and inputs of a matrix, (o, i)."""

USUAL_INPUTS = 128
"""Inputs of a matrix whose updates `fan_in_rms` gives a root mean square of 1."""


def sizes_of(update: Tensor, grad: Tensor) -> Sizes:
    """The sizes of whole matrices [G, o, i]."""
    return frobenius(update), frobenius(grad)


def frobenius(matrix: Tensor) -> Tensor:
    """The Frobenius norms [G, 1, 1] of matrices [G, o, i]."""
    norm: Tensor = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)
    return norm


def match_norm(
    update: Tensor, grad: Tensor, sizes: Sizes | None = None, sides: Sides | None = None
) -> Tensor:
    """Give `update` the Frobenius norm of `grad`, per matrix (Algorithm 1, line 10).

    A zero gradient stays zero. Where the update is not finite or is zero although the gradient
    isn't, the gradient itself is returned: a broken factor costs the preconditioning of a step,
    never the step.

    Args:
        update: ΔW, [G, o, i].
        grad: ∇W, [G, o, i], same dtype.
        sizes: Their norms, where these are blocks of the matrices.
        sides: As for `unit_rms`.

    Returns:
        A tensor [G, o, i]; may reuse the memory of `update`.
    """
    size, wanted = sizes or sizes_of(update, grad)
    ratio = wanted / size
    # Comparisons with not-a-number are false; an infinite size has the ratio 0.
    sound = (size < math.inf) & (ratio < math.inf)
    chosen = torch.where(sound, update, grad, out=update)
    return chosen.mul_(torch.where(sound, ratio, 1))


def unit_rms(
    update: Tensor, grad: Tensor, sizes: Sizes | None = None, sides: Sides | None = None
) -> Tensor:
    """Give `update` a root mean square of 1, per matrix, so that a learning rate is a step's size.

    A zero gradient stays zero. Where the update is not finite or is zero although the gradient
    isn't, the gradient takes its place and is scaled the same way.

    Args:
        update: ΔW, [G, o, i].
        grad: What was preconditioned, [G, o, i], same dtype.
        sizes: Their norms, where these are blocks of the matrices.
        sides: o and i of a whole matrix, where these are blocks.

    Returns:
        A tensor [G, o, i]; may reuse the memory of `update`.
    """
    outputs, inputs = sides or update.shape[-2:]
    return of_norm(update, grad, sizes, math.sqrt(outputs * inputs))


def fan_in_rms(
    update: Tensor, grad: Tensor, sizes: Sizes | None = None, sides: Sides | None = None
) -> Tensor:
    """Give `update` a root mean square of √(128/i), per matrix: that of `unit_rms` at i = 128.

    What a step adds to an output is then about the same however many inputs it is a sum over, as
    where Muon scales an orthogonal update by √max(1, o/i) and o ≥ i; so a learning rate fits
    networks of other widths too. Arguments and the rest are those of `unit_rms`.
    """
    outputs, _ = sides or update.shape[-2:]
    return of_norm(update, grad, sizes, math.sqrt(outputs * USUAL_INPUTS))


def of_norm(update: Tensor, grad: Tensor, sizes: Sizes | None, wanted: float) -> Tensor:
    """Give `update` the Frobenius norm `wanted`; see `unit_rms` for the rest."""
    size, other = sizes or sizes_of(update, grad)
    sound = (size < math.inf) & (wanted / size < math.inf)
    chosen = torch.where(sound, update, grad, out=update)
    size = torch.where(sound, size, other)
    return chosen.mul_(torch.where(size == 0, 1, wanted / size))


def keep_finite(
    update: Tensor, grad: Tensor, sizes: Sizes | None = None, sides: Sides | None = None
) -> Tensor:
    """Give `update`, or `grad` for the matrices where the update is not finite, [G, o, i].

    The result reuses the memory of `update`. Arguments are those of `unit_rms`.
    """
    size = sizes[0] if sizes else frobenius(update)
    return torch.where(size < math.inf, update, grad, out=update)


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
