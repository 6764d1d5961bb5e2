"""BERT and its like by their shapes alone, with 30,522 words and 512 places."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

WORDS, PLACES = 30_522, 512


@dataclass(frozen=True)
class Size:
    """An encoder.

    Attributes:
        title: What figures call it.
        layers: Number of layers.
        width: Numbers a token.
        inner: The same between the two matrices at the end of a layer.
    """

    title: str
    layers: int
    width: int
    inner: int


MODELS = {
    "bert-large": Size("BERT-Large", 24, 1024, 4096),
    "bert-base": Size("BERT-Base", 12, 768, 3072),
    "minilm-l12": Size("MiniLM-L12", 12, 384, 1536),
    "minilm-l6": Size("MiniLM-L6", 6, 384, 1536),
}
"""Every encoder by its name."""


def bert_large() -> nn.Module:
    """The parameters of BERT-Large as pretrained."""
    return encoder(MODELS["bert-large"])


def encoder(size: Size) -> nn.Module:
    """The parameters of a model as pretrained, without memory and without a forward pass."""
    width = size.width
    with torch.device("meta"):
        blocks = [encoder_layer(size) for _ in range(size.layers)]
        return nn.ModuleDict(
            {
                "words": nn.Embedding(WORDS, width),
                "places": nn.Embedding(PLACES, width),
                "kinds": nn.Embedding(2, width),
                "norm": nn.LayerNorm(width),
                "layers": nn.ModuleList(blocks),
                "pooler": nn.Linear(width, width),
                "head": nn.Linear(width, width),
                "head_norm": nn.LayerNorm(width),
                "next_sentence": nn.Linear(width, 2),
            }
        )


def encoder_layer(size: Size) -> nn.Module:
    """The matrices and norms of one encoder layer."""
    width, inner = size.width, size.inner
    sides = {
        **dict.fromkeys(("query", "key", "value", "output"), (width, width)),
        "expand": (width, inner),
        "shrink": (inner, width),
    }
    layer = nn.ModuleDict({name: nn.Linear(*side) for name, side in sides.items()})
    layer.update({"norm": nn.LayerNorm(width), "output_norm": nn.LayerNorm(width)})
    return layer
