"""A small convolutional network with batch normalisation, CIFAR-100 in its 20 groups of classes.

Three convolutions of 16, 32 and 64 channels, each halved in size by pooling, then a linear layer.
Images are flipped at random, anew in each epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mkor_bench.data.cifar100 import load_cifar100, normalised
from mkor_bench.data.images import Split
from mkor_bench.data.store import Store
from mkor_bench.tasks.batches import shuffled_batches
from mkor_bench.tasks.task import Task

BATCH_SIZE = 64
CLASSES = 20
DEFAULT_LRS = {"sgd": 0.1, "adamw": 0.01, "lamb": 0.03, "mkor": 0.1, "mkor-adamw": 0.01}


class Size(NamedTuple):
    """How large the task is.

    Attributes:
        channels: Of the convolutions.
        steps: Of a run.
        test_images: How many the metric looks at.
    """

    channels: tuple[int, ...]
    steps: int
    test_images: int


FULL = Size((16, 32, 64), 300, 2_000)
QUICK = Size((8, 16), 40, 200)


@dataclass(frozen=True)
class Cifar100Convnet:
    """The parts of the task.

    Attributes:
        train: Normalised training images and their classes.
        test: The same for testing.
        channels: Of the convolutions.
    """

    train: Split
    test: Split
    channels: tuple[int, ...]

    def build(self, seed: int) -> nn.Module:
        """Makes the network; the run has seeded torch's generator."""
        del seed
        layers: list[nn.Module] = []
        for before, after in pairwise((3, *self.channels)):
            layers += [
                nn.Conv2d(before, after, 3, padding=1, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]
        mean = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(*layers, *mean, nn.Linear(self.channels[-1], CLASSES))

    def batches(self, seed: int) -> Iterator[tuple[Tensor, ...]]:
        """Endless training batches of flipped images and their classes."""
        # A seed of its own, lest the flips follow from the order of the images.
        generator = torch.Generator().manual_seed(seed + 1)
        data = (self.train.images, self.train.labels)
        for images, labels in shuffled_batches(data, BATCH_SIZE, seed):
            yield flipped(images, generator), labels

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Cross entropy, averaged over the batch."""
        images, labels = batch
        return cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module) -> float:
        """The share of test images that are told right."""
        guesses = model(self.test.images).argmax(dim=1)
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


def task(data: Store, quick: bool = False) -> Task:
    """Makes the task.

    Args:
        data: Where CIFAR-100 is: a folder, or "hub".
        quick: A smaller network for fewer steps.

    Returns:
        The task.
    """
    size = QUICK if quick else FULL
    cifar = load_cifar100(data, "coarse")
    train, test = (
        Split(normalised(part.images), part.labels)
        for part in (cifar.train, cifar.test.head(size.test_images))
    )
    parts = Cifar100Convnet(train, test, size.channels)
    return Task(
        name="cifar100-convnet",
        description="small convolutional network with batch norm, CIFAR-100 in 20 classes",
        build=parts.build,
        batches=parts.batches,
        loss=parts.loss,
        evaluate=parts.evaluate,
        metric="test accuracy",
        higher_is_better=True,
        steps=size.steps,
        default_lrs=DEFAULT_LRS,
    )
