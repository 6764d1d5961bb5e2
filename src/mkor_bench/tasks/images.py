"""What the tasks on labelled images share: batches, loss and accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from mkor_bench.data.images import Split
from mkor_bench.tasks.batches import shuffled_batches

Augment = Callable[[Tensor, torch.Generator], Tensor]

_CHUNK = 500


@dataclass(frozen=True)
class Classification:
    """Images and their classes, with a network's loss on them.

    Attributes:
        train: Training images and their classes.
        test: The same for testing.
        batch_size: Rows in a batch.
        augment: Changes the images of a batch at random, anew in each epoch.
    """

    train: Split
    test: Split
    batch_size: int
    augment: Augment

    def batches(self, seed: int) -> Iterator[tuple[Tensor, ...]]:
        """Endless training batches of changed images and their classes."""
        # A seed of its own, lest the changes follow from the order of the images.
        generator = torch.Generator().manual_seed(seed + 1)
        data = (self.train.images, self.train.labels)
        for images, labels in shuffled_batches(data, self.batch_size, seed):
            yield self.augment(images, generator), labels

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Cross entropy, averaged over the batch."""
        images, labels = batch
        return cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module) -> float:
        """The share of test images that are told right."""
        guesses = torch.cat([model(part).argmax(dim=1) for part in self.test.images.split(_CHUNK)])
        return float((guesses == self.test.labels).double().mean())


def flipped(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirrors each image, left to right, with probability one half.

    Args:
        images: [rows, channels, height, width].
        generator: Draws which.

    Returns:
        Images of the same shape.
    """
    chosen = torch.rand(len(images), generator=generator) < 0.5
    return torch.where(chosen[:, None, None, None], images.flip(3), images)


def shifted(images: Tensor, generator: torch.Generator, pixels: int = 2) -> Tensor:
    """Moves each image by up to some pixels in each direction, filling with zeros.

    Args:
        images: [rows, channels, height, width].
        generator: Draws the shifts.
        pixels: The longest.

    Returns:
        Images of the same shape.
    """
    rows, _, height, width = images.shape
    around = pad(images, (pixels,) * 4)
    windows = around.unfold(2, height, 1).unfold(3, width, 1).permute(0, 2, 3, 1, 4, 5)
    down, right = torch.randint(0, 2 * pixels + 1, (2, rows), generator=generator)
    # windows: [rows, shifts, shifts, channels, height, width], one for each pair of shifts
    return windows[torch.arange(rows), down, right]


def flipped_and_shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Both, with shifts of up to 4 pixels: the usual augmentation of small photographs."""
    return shifted(flipped(images, generator), generator, pixels=4)
