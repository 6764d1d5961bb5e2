"""A deep autoencoder of digits: narrow in the middle, tanh throughout.

Deep autoencoders are the classical test of second-order methods (Hinton and
Salakhutdinov 2006, Martens 2010): the bottleneck and the saturating units make the
loss ill-conditioned, so that a gradient says little about the best direction.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from mkor_bench.data.store import Store
from mkor_bench.tasks.batches import shuffled_batches
from mkor_bench.tasks.digits import load_digits
from mkor_bench.tasks.task import Task

WIDTHS = (64, 128, 64, 32, 8, 32, 64, 128, 64)
BATCH_SIZE = 128
DEFAULT_LRS = {"sgd": 0.03, "adamw": 0.01, "lamb": 0.03, "mkor": 0.03, "mkor-adamw": 0.03}
"""What comparisons choose, in the middle."""


def build(seed: int) -> nn.Module:
    """Makes the network: linear layers with tanh between them, logits at the end."""
    del seed  # the run has seeded torch's generator, which initialises the layers
    layers: list[nn.Module] = []
    for before, after in pairwise(WIDTHS):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def batches(seed: int) -> Iterator[tuple[Tensor, ...]]:
    """Endless training batches of images."""
    return shuffled_batches((load_digits().train_images,), BATCH_SIZE, seed)


def reconstruction_loss(model: nn.Module, images: Tensor) -> Tensor:
    """Cross entropy of the pixels, summed over an image, averaged over the batch."""
    total = binary_cross_entropy_with_logits(model(images), images, reduction="sum")
    return total / len(images)


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """The training loss of a batch."""
    return reconstruction_loss(model, batch[0])


def evaluate(model: nn.Module) -> float:
    """The same loss on the test images."""
    return reconstruction_loss(model, load_digits().test_images).item()


def task(data: Store, quick: bool = False) -> Task:
    """Makes the task; the data come with scikit-learn, so no folder is needed.

    Args:
        data: Not used.
        quick: Fewer steps.

    Returns:
        The task.
    """
    del data
    return Task(
        name="digits-autoencoder",
        description="deep tanh autoencoder, 8x8 digits through 8 numbers and back",
        build=build,
        batches=batches,
        loss=loss,
        evaluate=evaluate,
        metric="test loss",
        higher_is_better=False,
        steps=60 if quick else 1000,
        default_lrs=DEFAULT_LRS,
    )
