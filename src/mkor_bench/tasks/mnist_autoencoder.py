"""The deep autoencoder of MNIST that second-order methods have been tried on since 2006.

784 pixels through 500, 250, 100 to 30 numbers and back (Hinton and Salakhutdinov 2006, Martens
2010), with tanh between the layers and Glorot's initialisation, which is made for it. In 300 steps
SGD stays on the plateau where every image becomes the mean image, at a loss of about 205.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from mkor_bench.data.mnist import load_mnist
from mkor_bench.data.store import Store
from mkor_bench.tasks.batches import shuffled_batches
from mkor_bench.tasks.task import Task

BATCH_SIZE = 128
DEFAULT_LRS = {"sgd": 0.003, "adamw": 0.001, "lamb": 0.01, "mkor": 0.01, "mkor-adamw": 0.001}


class Size(NamedTuple):
    """How large the task is.

    Attributes:
        widths: Of the encoder; the decoder mirrors them.
        steps: Of a run.
    """

    widths: tuple[int, ...]
    steps: int


FULL = Size((784, 500, 250, 100, 30), 300)
QUICK = Size((784, 64, 16), 40)


@dataclass(frozen=True)
class MnistAutoencoder:
    """The parts of the task.

    Attributes:
        train: Training images, [rows, 784], pixels from 0 to 1.
        test: Test images.
        widths: Of all layers, from the pixels and back to them.
    """

    train: Tensor
    test: Tensor
    widths: tuple[int, ...]

    def build(self, seed: int) -> nn.Module:
        """Makes the network; the run has seeded torch's generator."""
        del seed
        layers: list[nn.Module] = []
        for before, after in pairwise(self.widths):
            layers += [glorot(nn.Linear(before, after)), nn.Tanh()]
        return nn.Sequential(*layers[:-1])

    def batches(self, seed: int) -> Iterator[tuple[Tensor, ...]]:
        """Endless training batches of images."""
        return shuffled_batches((self.train,), BATCH_SIZE, seed)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Cross entropy of the pixels, summed over an image, averaged over the batch."""
        (images,) = batch
        return binary_cross_entropy_with_logits(model(images), images, reduction="sum") / len(
            images
        )

    def evaluate(self, model: nn.Module) -> float:
        """The same loss on the test images."""
        return self.loss(model, (self.test,)).item()


def glorot(layer: nn.Linear) -> nn.Linear:
    """Initialises a layer for tanh: uniform weights by fan-in and fan-out, no bias."""
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


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
    parts = MnistAutoencoder(
        mnist.train.images.flatten(1),
        mnist.test.images.flatten(1),
        size.widths + size.widths[-2::-1],
    )
    return Task(
        name="mnist-autoencoder",
        description="deep tanh autoencoder, 28x28 digits through 30 numbers and back",
        build=parts.build,
        batches=parts.batches,
        loss=parts.loss,
        evaluate=parts.evaluate,
        metric="test loss",
        higher_is_better=False,
        steps=size.steps,
        default_lrs=DEFAULT_LRS,
    )
