"""A small convolutional network that tells digits apart, from shifted images.

Each training image is moved by up to a pixel in each direction, anew in each epoch.
That helps on the test images, and keeps the network from learning its 1,437 training
images by heart, after which a comparison of losses would say little.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from mkor_bench.data.store import Store
from mkor_bench.tasks.batches import shuffled_batches
from mkor_bench.tasks.digits import load_digits
from mkor_bench.tasks.task import Task

BATCH_SIZE = 128
DEFAULT_LRS = {"sgd": 0.3, "adamw": 0.03, "lamb": 0.03, "mkor": 0.3, "mkor-adamw": 0.03}
"""What comparisons choose, in the middle."""


def build(seed: int) -> nn.Module:
    """Makes the network: two convolutions, the second of stride 2, two linear layers."""
    del seed  # the run has seeded torch's generator, which initialises the layers
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def batches(seed: int) -> Iterator[tuple[Tensor, ...]]:
    """Endless training batches of shifted images and their labels."""
    digits = load_digits()
    data = (digits.train_images, digits.train_labels)
    # A seed of its own, lest the shifts follow from the order of the images.
    generator = torch.Generator().manual_seed(seed + 1)
    for images, labels in shuffled_batches(data, BATCH_SIZE, seed):
        yield shifted(images, generator), labels


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Moves each image by -1, 0 or 1 pixels in each direction, filling with black.

    Args:
        images: Images, [rows, 64].
        generator: Draws the shifts.

    Returns:
        Images of the same shape.
    """
    rows = len(images)
    windows = pad(images.view(rows, 8, 8), (1, 1, 1, 1)).unfold(1, 8, 1).unfold(2, 8, 1)
    down, right = torch.randint(0, 3, (2, rows), generator=generator)
    # windows: [rows, 3, 3, 8, 8], one window for each pair of shifts
    return windows[torch.arange(rows), down, right].reshape(rows, 64)


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Cross entropy, averaged over the batch."""
    images, labels = batch
    return cross_entropy(model(images), labels)


def evaluate(model: nn.Module) -> float:
    """The share of test images that are told right."""
    digits = load_digits()
    guesses = model(digits.test_images).argmax(dim=1)
    return float((guesses == digits.test_labels).double().mean())


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
        name="digits-classifier",
        description="small convolutional network, shifted 8x8 digits to 10 classes",
        build=build,
        batches=batches,
        loss=loss,
        evaluate=evaluate,
        metric="test accuracy",
        higher_is_better=True,
        steps=60 if quick else 300,
        default_lrs=DEFAULT_LRS,
    )
