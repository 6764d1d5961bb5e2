"""AlexNet with 20.7 million parameters on the 100 classes of CIFAR-100, flipped and shifted."""

from __future__ import annotations

from mkor_bench.data.cifar100 import load_cifar100, normalised
from mkor_bench.data.store import Store
from mkor_bench.models.alexnet import alexnet
from mkor_bench.tasks.images import Classification, flipped_and_shifted
from mkor_bench.tasks.task import Task

BATCH_SIZE = 64
CLASSES = 100
DEFAULT_LRS = {"sgd": 0.03, "adamw": 1e-4, "lamb": 0.003, "mkor": 0.03, "mkor-adamw": 1e-4}


def task(data: Store, quick: bool = False) -> Task:
    """Makes the task.

    Args:
        data: Where CIFAR-100 is: a folder, or "hub".
        quick: A narrower network for fewer steps.

    Returns:
        The task.
    """
    cifar = load_cifar100(data, "fine")
    test = cifar.test.head(200 if quick else 2_000)
    parts = Classification(
        cifar.train.map(normalised), test.map(normalised), BATCH_SIZE, flipped_and_shifted
    )
    return Task(
        name="cifar100-alexnet",
        description="AlexNet, CIFAR-100 in 100 classes",
        build=lambda seed: alexnet(CLASSES, 16 if quick else 1),
        batches=parts.batches,
        loss=parts.loss,
        evaluate=parts.evaluate,
        metric="test accuracy",
        higher_is_better=True,
        steps=60 if quick else 600,
        default_lrs=DEFAULT_LRS,
    )
