"""Random signs from a hash of numbers, and the number that a call's rows begin with.

A compiled graph calls these as operators that the compiler does not look into. Inlined, each
consumer would compute the hash again, the hash of a hash several hundred times, and compiling took
longer than training.
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = 31
"""Signs that one hash gives."""

MASK = 2**32 - 1


def mix(numbers: Tensor) -> Tensor:
    """A hash of 32-bit numbers held in int64; no product leaves the range of int64."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x21F0AAAD), (15, 0x31848BAB)):
        numbers = ((numbers ^ (numbers >> shift)) * factor) & MASK
    return numbers ^ (numbers >> 14)


def signs(start: Tensor, first: int, count: int, vectors: int, salt: int) -> Tensor:
    """Signs ±1 [r, n] in float32 of `count` rows from `start + first` on."""
    place = torch.arange(first, first + count, device=start.device)
    return signs_at(start, place, vectors, salt)


def signs_at(start: Tensor, place: Tensor, vectors: int, salt: int) -> Tensor:
    """Signs ±1 [r, n] in float32 of the rows `start + place`, place [n]."""
    make = opaque_signs if torch.compiler.is_compiling() else hashed_signs
    made: Tensor = make(start, place, vectors, salt)
    return made


def number(bits: Tensor, seed: Tensor, counts: Tensor | None) -> Tensor:
    """The number of a call's first row, a scalar.

    Args:
        bits: Parts of its entries, [n].
        seed: The hash of step, batch and layer, a scalar.
        counts: Which of them count, [n]; the others don't change the number. None if all do.
    """
    make = opaque_number if torch.compiler.is_compiling() else hashed_number
    made: Tensor = make(bits, seed, counts)
    return made


def hashed_signs(start: Tensor, place: Tensor, vectors: int, salt: int) -> Tensor:
    """See `signs_at`.

    Numbers begin elsewhere for each salt and group of signs, so far apart that none comes twice.
    """
    parts: list[Tensor] = []
    for group in range(0, vectors, BITS):
        hashed = mix(((start ^ ((salt + 0x1B873593 * group) & MASK)) + place) & MASK)  # [n]
        if vectors > 1:
            shifts = torch.arange(min(BITS, vectors - group), device=start.device)
            hashed = hashed >> shifts[:, None]
        parts.append(hashed.view(-1, place.shape[0]) & 1)
    bits = parts[0] if len(parts) == 1 else torch.cat(parts)
    return bits.to(torch.float32).mul_(2).sub_(1)


def hashed_number(bits: Tensor, seed: Tensor, counts: Tensor | None) -> Tensor:
    """See `number`."""
    # A sum of entries times odd random numbers tells entries apart; 30 bits leave it in range.
    factors = mix(torch.arange(bits.shape[0], device=bits.device)) >> 2 | 1  # [n]
    if counts is None:
        hashed = (bits * factors).sum()  # of integers: in whatever order
    else:
        place = (counts.cumsum(dim=0) - 1).clamp_min(0)
        hashed = (bits * factors[place] * counts).sum()
    return mix((hashed ^ (hashed >> 32) ^ seed) & MASK)


opaque_signs = torch.library.custom_op("mkor::signs", hashed_signs, mutates_args=())
opaque_number = torch.library.custom_op("mkor::number", hashed_number, mutates_args=())


@opaque_signs.register_fake
def shape_of_signs(start: Tensor, place: Tensor, vectors: int, salt: int) -> Tensor:
    """A tensor like the signs, for the compiler."""
    return place.new_empty((vectors, place.shape[0]), dtype=torch.float32)


@opaque_number.register_fake
def shape_of_number(bits: Tensor, seed: Tensor, counts: Tensor | None) -> Tensor:
    """A tensor like the number, for the compiler."""
    return torch.empty_like(seed)
