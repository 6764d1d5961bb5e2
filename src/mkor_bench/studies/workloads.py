"""Models with a batch, for what does not depend on the data: time and memory.

| name | model | batch |
| ---- | ----- | ----- |
| bert | encoder blocks as in BERT-base | sequences of random vectors |
| resnet | a residual network for images of 32x32 | random images |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mkor_bench.models.resnet import ResNet
from mkor_bench.models.transformer import Block

Loss = Callable[[], Tensor]
Workload = Callable[[], tuple[nn.Module, Loss]]
"""Makes a model, and a function that returns its loss on a batch."""

CLASSES = 10


def encoder(
    width: int, heads: int, blocks: int, sequences: int, tokens: int
) -> tuple[nn.Module, Loss]:
    """Blocks of a transformer on random vectors."""
    model = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(blocks)))
    vectors = torch.randn(sequences, tokens, width)
    return model, lambda: model(vectors).square().mean()


def residual(blocks: int, width: int, images: int) -> tuple[nn.Module, Loss]:
    """A residual network on random images."""
    model = ResNet(CLASSES, blocks, width)
    pixels, labels = torch.randn(images, 3, 32, 32), torch.randint(0, CLASSES, (images,))
    return model, lambda: cross_entropy(model(pixels), labels)


def layer(width: int, rows: int) -> tuple[nn.Module, Loss]:
    """One linear layer without a bias, as wide as its input."""
    model = nn.Linear(width, width, bias=False)
    vectors = torch.randn(rows, width)
    return model, lambda: model(vectors).square().mean()


FULL: dict[str, tuple[str, Workload]] = {
    "bert": (
        "two BERT-base blocks, 8 sequences of 128 tokens",
        partial(encoder, 768, 12, 2, 8, 128),
    ),
    "resnet": ("ResNet-20, 128 images of 32x32", partial(residual, 3, 16, 128)),
}
QUICK: dict[str, tuple[str, Workload]] = {
    "bert": (
        "one block of width 128, 4 sequences of 32 tokens",
        partial(encoder, 128, 4, 1, 4, 32),
    ),
    "resnet": ("ResNet-8 of width 8, 16 images of 32x32", partial(residual, 1, 8, 16)),
}


def workloads(quick: bool) -> dict[str, tuple[str, Workload]]:
    """Returns the workloads by their names: what each is in words, and what makes it."""
    return QUICK if quick else FULL
