"""ResNet-20 and ResNet-50 on CIFAR-10, images flipped and shifted."""

from __future__ import annotations

from torch import nn

from mkor_bench.data.cifar10 import load_cifar10, normalised
from mkor_bench.data.store import Store
from mkor_bench.models.resnet import ResNet
from mkor_bench.models.resnet50 import resnet50
from mkor_bench.tasks.images import Classification, flipped_and_shifted
from mkor_bench.tasks.task import Task

CLASSES = 10
BATCH_SIZES = {"resnet20": 32, "resnet50": 128}
STEPS = {"resnet20": 600, "resnet50": 39_000}
"""The larger network's are a hundred epochs."""

DEFAULT_LRS = {"sgd": 0.1, "adamw": 0.01, "lamb": 0.03, "mkor": 0.1, "mkor-adamw": 0.01}


def task(data: Store, quick: bool = False, *, model: str) -> Task:
    """Makes the task.

    Args:
        data: Where CIFAR-10 is: a folder, or "hub".
        quick: A smaller network for fewer steps.
        model: "resnet20" or "resnet50".

    Returns:
        The task.
    """

    def build(seed: int) -> nn.Module:
        del seed
        if model == "resnet50":
            return resnet50(CLASSES, quick, small=True)
        return ResNet(CLASSES, *((1, 4) if quick else (3, 16)))

    cifar = load_cifar10(data)
    test = cifar.test.head(200) if quick else cifar.test
    parts = Classification(
        cifar.train.map(normalised), test.map(normalised), BATCH_SIZES[model], flipped_and_shifted
    )
    return Task(
        name=f"cifar10-{model}",
        description=f"{model.replace('resnet', 'ResNet-')}, CIFAR-10 in 10 classes",
        build=build,
        batches=parts.batches,
        loss=parts.loss,
        evaluate=parts.evaluate,
        metric="test accuracy",
        higher_is_better=True,
        steps=40 if quick else STEPS[model],
        default_lrs=DEFAULT_LRS,
    )
