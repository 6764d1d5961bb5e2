"""ResNet-20 on the 100 classes of CIFAR-100, images flipped and shifted."""

from __future__ import annotations

from typing import NamedTuple

from mkor_bench.data.cifar100 import load_cifar100, normalised
from mkor_bench.data.store import Store
from mkor_bench.models.resnet import ResNet
from mkor_bench.tasks.images import Classification, flipped_and_shifted
from mkor_bench.tasks.task import Task

BATCH_SIZE = 32
CLASSES = 100
DEFAULT_LRS = {"sgd": 0.1, "adamw": 0.01, "lamb": 0.03, "mkor": 0.1, "mkor-adamw": 0.01}


class Size(NamedTuple):
    """How large the task is.

    Attributes:
        blocks: In each of three stages.
        width: Channels of the first stage.
        steps: Of a run.
        test_images: How many the metric looks at.
    """

    blocks: int
    width: int
    steps: int
    test_images: int


FULL = Size(3, 16, 600, 2_000)
QUICK = Size(1, 4, 40, 200)


def task(data: Store, quick: bool = False) -> Task:
    """Makes the task.

    Args:
        data: Where CIFAR-100 is: a folder, or "hub".
        quick: A smaller network for fewer steps.

    Returns:
        The task.
    """
    size = QUICK if quick else FULL
    cifar = load_cifar100(data, "fine")
    train, test = cifar.train.map(normalised), cifar.test.head(size.test_images).map(normalised)
    parts = Classification(train, test, BATCH_SIZE, flipped_and_shifted)
    return Task(
        name="cifar100-resnet20",
        description="ResNet-20, CIFAR-100 in 100 classes",
        build=lambda seed: ResNet(CLASSES, size.blocks, size.width),
        batches=parts.batches,
        loss=parts.loss,
        evaluate=parts.evaluate,
        metric="test accuracy",
        higher_is_better=True,
        steps=size.steps,
        default_lrs=DEFAULT_LRS,
    )
