"""The lemmas of the paper in numbers: the printed rule, its sign, its growth, its rounding.

Formula 5 as printed, for the inverse J [d, d] and a vector v [d]:

    J⁺ = γJ + (1-γ)/(γ²(1 + γ(1-γ)vᵀJv)) · Jv vᵀJ
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

DECAY, LIMIT, BLEND = 0.9, 2.0, 0.95
"""γ, ε and ζ of Algorithm 1; γ is not printed, the others are the released code's."""

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
UPDATES = 300
HUGE = 1e30
"""The norm at which an inverse counts as out of range."""

ROUNDING = 1e-12
"""What float64 may make of an eigenvalue of zero, relative to the largest."""


def printed(inverse: Tensor, vector: Tensor) -> Tensor:
    """Returns J⁺ of formula 5 as printed."""
    image = inverse @ vector
    scale = (1 - DECAY) / (DECAY**2 * (1 + DECAY * (1 - DECAY) * (vector @ image)))
    return DECAY * inverse + scale * torch.outer(image, image)


def stabilised(inverse: Tensor) -> Tensor:
    """Returns ζJ + (1-ζ)I where ‖J‖ > ε, as lines 5 and 6 of Algorithm 1, else J."""
    if float(inverse.abs().max()) <= LIMIT:
        return inverse
    return BLEND * inverse + (1 - BLEND) * torch.eye(len(inverse), dtype=inverse.dtype)


def bound(largest: float, width: int, quantum: float) -> float:
    """Returns Lemma 3.2's (γ + 4(1-γ)/γ² m³d²)ε, with 1 as the constant of its O.

    Args:
        largest: m, the largest number in J and v.
        width: d.
        quantum: ε, the largest error of quantization.
    """
    return (DECAY + 4 * (1 - DECAY) / DECAY**2 * largest**3 * width**2) * quantum


def rounding(width: int, size: float, dtype: torch.dtype, seed: int) -> dict[str, float]:
    """Compares the error that quantized J and v make in formula 5 with the lemma's bound.

    Args:
        width: d.
        size: Of the entries of v.
        dtype: What J and v are rounded to.
        seed: Of the numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(width, width, generator=generator, dtype=torch.float64) / width**0.5
    inverse = root @ root.mT + torch.eye(width, dtype=torch.float64)
    vector = size * torch.randn(width, generator=generator, dtype=torch.float64)
    near = inverse.to(dtype).double(), vector.to(dtype).double()
    quantum = max(float((a - b).abs().max()) for a, b in zip((inverse, vector), near, strict=True))
    largest = max(float(inverse.abs().max()), float(vector.abs().max()))
    error = float((printed(*near) - printed(inverse, vector)).abs().max())
    return {"error": error, "bound": bound(largest, width, quantum)}


def growth(width: int, size: float, stabilise: bool, seed: int) -> dict[str, Any]:
    """Follows formula 5 over many updates.

    Args:
        width: d.
        size: Of the entries of the vectors.
        stabilise: Whether Algorithm 1's stabiliser acts before each update.
        seed: Of the vectors.

    Returns:
        The least eigenvalue of all updates within the range, relative to the largest of the same
        update ("least"), the largest entry at the end ("end", infinite beyond HUGE), and the update
        at which it left the range, or None.
    """
    generator = torch.Generator().manual_seed(seed)
    inverse = torch.eye(width, dtype=torch.float64)
    least = 1.0
    for update in range(1, UPDATES + 1):
        vector = size * torch.randn(width, generator=generator, dtype=torch.float64)
        inverse = printed(stabilised(inverse) if stabilise else inverse, vector)
        if not float(inverse.abs().max()) < HUGE:
            return {"least": least, "end": math.inf, "left": update}
        values = torch.linalg.eigvalsh(inverse)
        least = min(least, float(values[0] / values[-1]))
    return {"least": least, "end": float(inverse.abs().max()), "left": None}


def measure(
    spec: Mapping[str, Any], data: str | None, report: Callable[[int], None]
) -> dict[str, Any]:
    """Measures all of it for each width."""
    del data
    quantized, grown = [], []
    for width in spec["widths"]:
        for size in spec["sizes"]:
            for told, dtype in TYPES.items():
                found = [rounding(width, size, dtype, seed) for seed in range(spec["seeds"])]
                worst = max(found, key=lambda own: own["error"] / own["bound"])
                quantized.append({"d": width, "size": size, "type": told, **worst})
            for stabilise in (False, True):
                own = growth(width, size, stabilise, 0)
                grown.append({"d": width, "size": size, "stabilised": stabilise, **own})
        report(1)
    return {"quantized": quantized, "grown": grown}
