"""Blocks of a matrix that is spread over workers, and what must cross to precondition one.

Pure: no process group is seen here. A gradient is preconditioned in blocks by a generator that
yields `Shares` each time tensors must cross, and is resumed with their sums.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """The part [1, o', i'] of one matrix that a worker holds, where others hold the rest.

    Attributes:
        outputs: Which rows.
        inputs: Which columns, the bias column aside.
        column: Whether the bias column comes as well, as the block's last.
        counts_column: Whether this worker counts it in sums over columns.
    """

    outputs: slice
    inputs: slice
    column: bool
    counts_column: bool


@dataclass(frozen=True)
class Shares:
    """Tensors that add up over the workers that hold the other blocks of a matrix.

    Attributes:
        outputs: Added over the workers with other rows of the same columns.
        inputs: Added over the workers with other columns of the same rows.
        both: Added over all of them.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    both: dict[str, Tensor] = field(default_factory=dict)


Blockwise = Generator[Shares, dict[str, Tensor], Tensor]
"""Yields what must be added up, and returns the preconditioned block."""


def rows_of(vectors: Tensor, block: Block) -> Tensor:
    """The part [..., o'] of vectors [..., o] on the output side that belongs to a block."""
    return vectors[..., block.outputs]


def columns_of(vectors: Tensor, block: Block) -> Tensor:
    """The part [..., i'] of vectors [..., i] on the input side, bias column included."""
    own = vectors[..., block.inputs]
    return torch.cat([own, vectors[..., -1:]], dim=-1) if block.column else own


def counted(tensor: Tensor, block: Block) -> Tensor:
    """A tensor [..., i'] for sums over columns: zero in a bias column that others count."""
    if block.counts_column or not block.column:
        return tensor
    out = tensor.clone()
    out[..., -1] = 0
    return out
