"""BERT-Large by its shapes alone: 24 layers of width 1024, 4096 inside, 30,522 words."""

from __future__ import annotations

import torch
from torch import nn

LAYERS, WIDTH, INNER, WORDS, PLACES = 24, 1024, 4096, 30_522, 512


def bert_large() -> nn.Module:
    """The parameters of BERT-Large as pretrained, without memory and without a forward pass."""
    with torch.device("meta"):
        blocks = [encoder_layer() for _ in range(LAYERS)]
        norm = nn.LayerNorm(WIDTH)
        return nn.ModuleDict(
            {
                "words": nn.Embedding(WORDS, WIDTH),
                "places": nn.Embedding(PLACES, WIDTH),
                "kinds": nn.Embedding(2, WIDTH),
                "norm": norm,
                "layers": nn.ModuleList(blocks),
                "pooler": nn.Linear(WIDTH, WIDTH),
                "head": nn.Linear(WIDTH, WIDTH),
                "head_norm": nn.LayerNorm(WIDTH),
                "next_sentence": nn.Linear(WIDTH, 2),
            }
        )


def encoder_layer() -> nn.Module:
    """The matrices and norms of one encoder layer."""
    sides = {
        **dict.fromkeys(("query", "key", "value", "output"), (WIDTH, WIDTH)),
        "expand": (WIDTH, INNER),
        "shrink": (INNER, WIDTH),
    }
    layer = nn.ModuleDict({name: nn.Linear(*side) for name, side in sides.items()})
    layer.update({"norm": nn.LayerNorm(WIDTH), "output_norm": nn.LayerNorm(WIDTH)})
    return layer
