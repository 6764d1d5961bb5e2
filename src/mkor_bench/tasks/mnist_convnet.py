"""The convolutional network of LeCun et al. (1998) in today's form, on shifted MNIST digits."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from mkor_bench.data.mnist import load_mnist
from mkor_bench.data.store import Store
from mkor_bench.tasks.images import Classification, shifted
from mkor_bench.tasks.task import Task

BATCH_SIZE = 64
DEFAULT_LRS = {"sgd": 0.03, "adamw": 0.003, "lamb": 0.03, "mkor": 0.03, "mkor-adamw": 0.003}


class Size(NamedTuple):
    """How large the task is.

    Attributes:
        channels: Of the first convolution; the second has twice as many.
        hidden: Width of the linear layer between them and the output.
        steps: Of a run.
        test_images: How many the metric looks at.
    """

    channels: int
    hidden: int
    steps: int
    test_images: int


FULL = Size(16, 128, 400, 2_000)
QUICK = Size(4, 16, 40, 200)


def network(size: Size) -> nn.Module:
    """Makes the network, from torch's global generator: no normalisation, biases throughout.

    Args:
        size: How large.

    Returns:
        A model from images to logits.
    """
    return nn.Sequential(
        nn.Conv2d(1, size.channels, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(size.channels, 2 * size.channels, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * size.channels * 49, size.hidden),
        nn.ReLU(),
        nn.Linear(size.hidden, 10),
    )


def task(data: Store, quick: bool = False) -> Task:
    """Makes the task.

    Args:
        data: Where MNIST is: a folder, or "hub".
        quick: A smaller network for fewer steps.

    Returns:
        The task.
    """
    size = QUICK if quick else FULL
    mnist = load_mnist(data)
    parts = Classification(mnist.train, mnist.test.head(size.test_images), BATCH_SIZE, shifted)
    return Task(
        name="mnist-convnet",
        description="two convolutions and two linear layers, shifted digits to 10 classes",
        build=lambda seed: network(size),
        batches=parts.batches,
        loss=parts.loss,
        evaluate=parts.evaluate,
        metric="test accuracy",
        higher_is_better=True,
        steps=size.steps,
        default_lrs=DEFAULT_LRS,
    )
