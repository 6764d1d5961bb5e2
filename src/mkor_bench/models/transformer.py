"""A small transformer with a linear layer for each of query, key and value.

``nn.TransformerEncoderLayer`` keeps the three in one parameter that belongs to no layer. With a
layer each, every method sees every weight matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class Attention(nn.Module):
    """Multi-head attention.

    Args:
        width: Of the input and the output.
        heads: How many; they divide the width.
        causal: Whether a position sees only itself and those before it.
    """

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attends; [rows, length, width] to the same shape."""
        query, key, value = (
            layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then two linear layers, each on normalised input and added to it.

    Args:
        width: Of the input and the output; four times as wide inside.
        heads: Of the attention.
        causal: Whether a position sees only itself and those before it.
    """

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads, causal))
        self.feedforward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Transforms; [rows, length, width] to the same shape."""
        x = x + self.attention(x)
        return x + self.feedforward(x)


class LanguageModel(nn.Module):
    """Predicts tokens: the next one from those up to it, or masked ones from all.

    Args:
        vocabulary: How many tokens there are.
        context: The longest input.
        width: Of the blocks.
        causal: Whether a position sees only itself and those before it.
        blocks: How many.
        heads: Of each block.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        width: int,
        *,
        causal: bool,
        blocks: int = 2,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal) for _ in range(blocks)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def features(self, tokens: Tensor) -> Tensor:
        """Returns what the head reads, [rows, length, width], for tokens [rows, length]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.blocks(self.tokens(tokens) + self.positions(places))

    def forward(self, tokens: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Computes logits.

        Args:
            tokens: [rows, length].
            chosen: Positions to compute them for, a mask [rows, length]; all, if None.

        Returns:
            [rows, length, vocabulary], or [chosen positions, vocabulary].
        """
        features = self.features(tokens)
        return self.head(features if chosen is None else features[chosen])
