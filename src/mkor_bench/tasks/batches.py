"""Endless batches from tensors in memory, in an order that the seed fixes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def shuffled_batches(
    tensors: tuple[Tensor, ...], size: int, seed: int
) -> Iterator[tuple[Tensor, ...]]:
    """Goes through the rows again and again, shuffled anew in each epoch.

    The generator is its own, so what the model draws (dropout, say) never changes
    the order of the data, nor the other way round.

    Args:
        tensors: Tensors with the same number of rows.
        size: Rows in a batch; an incomplete last batch of an epoch is left out.
        seed: Fixes the order.

    Yields:
        The same rows of each tensor.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = len(tensors[0])
    while True:
        order = torch.randperm(rows, generator=generator)
        for begin in range(0, rows - size + 1, size):
            chosen = order[begin : begin + size]
            yield tuple(tensor[chosen] for tensor in tensors)
