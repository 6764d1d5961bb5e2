"""Batches from tensors in memory, in an order that the seed fixes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mkor_bench.errors import UserError


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

    Returns:
        An iterator that gives the same rows of each tensor.

    Raises:
        UserError: There are fewer rows than in a batch.
    """
    need_rows(len(tensors[0]), size, "rows to train on", "a batch")
    return _endless(tensors, size, torch.Generator().manual_seed(seed))


def passages(text: Tensor, length: int, rows: int, generator: torch.Generator) -> Tensor:
    """Draws passages from anywhere in a text.

    Args:
        text: As numbers, [places].
        length: Of a passage.
        rows: How many.
        generator: Draws where they begin.

    Returns:
        The passages, [rows, length].
    """
    begins = torch.randint(len(text) - length + 1, (rows, 1), generator=generator)
    return text[begins + torch.arange(length)]


def need_rows(count: int, least: int, what: str, use: str) -> None:
    """Raises where there is too little data for a single use of them.

    Args:
        count: How many rows there are.
        least: How many one use takes.
        what: The rows in words.
        use: The use in words.

    Raises:
        UserError: There are too few.
    """
    if count < least:
        raise UserError(
            f"{count} {what} are fewer than the {least} of {use}: "
            "name data with more of them with --data."
        )


def _endless(
    tensors: tuple[Tensor, ...], size: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, ...]]:
    rows = len(tensors[0])
    while True:
        order = torch.randperm(rows, generator=generator)
        for begin in range(0, rows - size + 1, size):
            chosen = order[begin : begin + size]
            yield tuple(tensor[chosen] for tensor in tensors)
