"""A small convolutional network with batch normalisation, CIFAR-100 in its 20 groups of classes.

Three convolutions of 16, 32 and 64 channels, each halved in size by pooling, then a linear layer.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from torch import nn

from mkor_bench.data.cifar100 import load_cifar100, normalised
from mkor_bench.data.store import Store
from mkor_bench.tasks.images import Classification, flipped
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


def network(channels: tuple[int, ...]) -> nn.Module:
    """Makes the network, from torch's global generator.

    Args:
        channels: Of the convolutions.

    Returns:
        A model from images to logits.
    """
    layers: list[nn.Module] = []
    for before, after in pairwise((3, *channels)):
        layers += [
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    mean = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *mean, nn.Linear(channels[-1], CLASSES))


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
    train, test = cifar.train.map(normalised), cifar.test.head(size.test_images).map(normalised)
    parts = Classification(train, test, BATCH_SIZE, flipped)
    return Task(
        name="cifar100-convnet",
        description="small convolutional network with batch norm, CIFAR-100 in 20 classes",
        build=lambda seed: network(size.channels),
        batches=parts.batches,
        loss=parts.loss,
        evaluate=parts.evaluate,
        metric="test accuracy",
        higher_is_better=True,
        steps=size.steps,
        default_lrs=DEFAULT_LRS,
    )
