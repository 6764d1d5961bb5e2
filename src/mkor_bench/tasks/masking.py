"""Words hidden as in BERT's pre-training."""

from __future__ import annotations

import torch
from torch import Tensor

SHARE = 0.15
"""Of the words that are to be predicted."""


def disguised(
    words: Tensor, chosen: Tensor, mask: int, others: tuple[int, int], generator: torch.Generator
) -> Tensor:
    """Hides 80 % of the chosen words, replaces 10 % by any word and leaves 10 %.

    Args:
        words: Numbers of words, [rows, length].
        chosen: Which are to be predicted, the same shape.
        mask: The number that hides a word.
        others: The first number of a word, and the number after the last.
        generator: Draws.

    Returns:
        The words to show, the same shape.
    """
    drawn = torch.randint(*others, words.shape, generator=generator)
    kind = torch.rand(words.shape, generator=generator)
    shown = torch.where(chosen & (kind < 0.8), mask, words)
    return torch.where(chosen & (kind >= 0.9), drawn, shown)


def drawn_places(known: Tensor, generator: torch.Generator) -> Tensor:
    """Draws the words to predict, as many in each row, so that all batches have one shape.

    Args:
        known: Which words are worth predicting, [rows, length]. Others are drawn only where a row
            has too few of them.
        generator: Draws.

    Returns:
        Places in each row, in ascending order, [rows, 15 % of the length and at least 1].
    """
    count = max(1, round(SHARE * known.shape[1]))
    chance = torch.rand(known.shape, generator=generator)
    return (chance + known).topk(count, dim=1).indices.sort(dim=1).values
