"""ResNet-50 on ImageNet: photographs cropped and flipped at random, read as they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mkor_bench.data.photographs import Photographs, Sample, load_photographs
from mkor_bench.data.store import Store
from mkor_bench.models.resnet50 import resnet50
from mkor_bench.tasks.photographs import ahead, central, cropped, stacked
from mkor_bench.tasks.task import Task

DEFAULT_LRS = {"sgd": 0.1, "adamw": 0.003, "lamb": 0.01, "mkor": 0.1, "mkor-adamw": 0.003}


class Size(NamedTuple):
    """How large the task is.

    Attributes:
        batch_size: Rows in a batch.
        side: Pixels of a crop.
        steps: Of a run.
        test_images: How many the metric looks at; all, if None.
    """

    batch_size: int
    side: int
    steps: int
    test_images: int | None


FULL = Size(32, 224, 35_700, None)
"""The steps are the paper's 57 epochs in batches of 2,048: 64 workers with 32 each."""

QUICK = Size(8, 32, 40, 12)


@dataclass(frozen=True)
class ImageNet:
    """The parts of the task.

    Attributes:
        data: The photographs.
        size: How large the task is.
        quick: Whether the network is tiny.
    """

    data: Photographs
    size: Size
    quick: bool

    def build(self, seed: int) -> nn.Module:
        """Makes the network; the run has seeded torch's generator."""
        del seed
        return resnet50(self.data.classes, self.quick)

    def batches(self, seed: int) -> Iterator[tuple[Tensor, ...]]:
        """Endless training batches of crops and their classes."""
        crops = torch.Generator().manual_seed(seed + 1)

        def drawn() -> Iterator[tuple[Sample, int]]:
            for sample in self.data.train(seed):
                yield sample, int(torch.randint(2**62, (), generator=crops))

        def prepared(row: tuple[Sample, int]) -> tuple[Tensor, int]:
            (photograph, label), crop = row
            return cropped(photograph(), crop, self.size.side), label

        rows = ahead(prepared, drawn())
        while True:
            yield stacked(islice(rows, self.size.batch_size))

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Cross entropy, averaged over the batch."""
        images, labels = batch
        return cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module) -> float:
        """The share of test photographs that are told right, by their central crops."""

        def prepared(sample: Sample) -> tuple[Tensor, int]:
            return central(sample[0](), self.size.side), sample[1]

        rows = ahead(prepared, islice(self.data.test(), self.size.test_images))
        right = seen = 0
        while chunk := list(islice(rows, self.size.batch_size)):
            images, labels = stacked(chunk)
            right += int((model(images).argmax(dim=1) == labels).sum())
            seen += len(labels)
        return right / seen


def task(data: Store, quick: bool = False) -> Task:
    """Makes the task.

    Args:
        data: Where ImageNet is: a folder, or "hub".
        quick: A tiny network on smaller crops for fewer steps.

    Returns:
        The task.
    """
    size = QUICK if quick else FULL
    parts = ImageNet(load_photographs(data), size, quick)
    return Task(
        name="imagenet-resnet50",
        description="ResNet-50, photographs of ImageNet in 1,000 classes",
        build=parts.build,
        batches=parts.batches,
        loss=parts.loss,
        evaluate=parts.evaluate,
        metric="test accuracy",
        higher_is_better=True,
        steps=size.steps,
        default_lrs=DEFAULT_LRS,
    )
