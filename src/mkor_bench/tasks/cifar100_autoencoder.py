"""A convolutional autoencoder of CIFAR-100's images.

Three convolutions of stride 2 to 128 numbers through a linear layer, and back by a linear layer
and three transposed convolutions, with ELU between them and no normalisation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor, nn

from mkor_bench.data.cifar100 import load_cifar100, normalised
from mkor_bench.data.store import Store
from mkor_bench.tasks.batches import shuffled_batches
from mkor_bench.tasks.task import Task

BATCH_SIZE = 64
DEFAULT_LRS = {"sgd": 0.3, "adamw": 0.003, "lamb": 0.03, "mkor": 0.3, "mkor-adamw": 0.003}


class Size(NamedTuple):
    """How large the task is.

    Attributes:
        channels: Of the first convolution, doubled in each of the next two.
        code: Numbers in the middle.
        steps: Of a run.
        test_images: How many the metric looks at.
    """

    channels: int
    code: int
    steps: int
    test_images: int


FULL = Size(16, 128, 400, 2_000)
QUICK = Size(4, 16, 40, 200)


@dataclass(frozen=True)
class Cifar100Autoencoder:
    """The parts of the task.

    Attributes:
        train: Normalised training images, [rows, 3, 32, 32].
        test: Normalised test images.
        size: How large the task is.
    """

    train: Tensor
    test: Tensor
    size: Size

    def build(self, seed: int) -> nn.Module:
        """Makes the network; the run has seeded torch's generator."""
        del seed
        one, code = self.size.channels, self.size.code
        widths = (3, one, 2 * one, 4 * one)
        down: list[nn.Module] = []
        up: list[nn.Module] = []
        for outer, inner in pairwise(widths):
            down += [nn.Conv2d(outer, inner, 3, stride=2, padding=1), nn.ELU()]
            up[:0] = [nn.ELU(), nn.ConvTranspose2d(inner, outer, 4, stride=2, padding=1)]
        deepest = 4 * one * 16
        middle = [nn.Flatten(), nn.Linear(deepest, code), nn.Linear(code, deepest)]
        return nn.Sequential(*down, *middle, nn.Unflatten(1, (4 * one, 4, 4)), *up)

    def batches(self, seed: int) -> Iterator[tuple[Tensor, ...]]:
        """Endless training batches of images."""
        return shuffled_batches((self.train,), BATCH_SIZE, seed)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Squared error of the normalised pixels, averaged over them and the batch."""
        (images,) = batch
        return (model(images) - images).square().mean()

    def evaluate(self, model: nn.Module) -> float:
        """The same loss on the test images."""
        parts = self.test.split(500)
        total = sum(self.loss(model, (part,)).item() * len(part) for part in parts)
        return total / len(self.test)


def task(data: Store, quick: bool = False) -> Task:
    """Makes the task.

    Args:
        data: Where CIFAR-100 is: a folder, or "hub".
        quick: A smaller network for fewer steps.

    Returns:
        The task.
    """
    size = QUICK if quick else FULL
    cifar = load_cifar100(data)
    test = cifar.test.head(size.test_images).images
    parts = Cifar100Autoencoder(normalised(cifar.train.images), normalised(test), size)
    return Task(
        name="cifar100-autoencoder",
        description="convolutional autoencoder, CIFAR-100 images through 128 numbers and back",
        build=parts.build,
        batches=parts.batches,
        loss=parts.loss,
        evaluate=parts.evaluate,
        metric="test loss",
        higher_is_better=False,
        steps=size.steps,
        default_lrs=DEFAULT_LRS,
    )
