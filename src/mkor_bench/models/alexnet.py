"""AlexNet (Krizhevsky et al. 2012) for images of 32 by 32 pixels, 20.7 million parameters."""

from __future__ import annotations

from torch import nn

CHANNELS = (64, 192, 384, 256, 256)


def alexnet(classes: int, shrink: int = 1) -> nn.Module:
    """Makes the network: five convolutions, two wide linear layers with dropout, and the last.

    It is the usual network without normalisation, its strides and first filters cut to the
    smaller images, so that one position is left before the linear layers.

    Args:
        classes: How many.
        shrink: Divides the width of every layer.

    Returns:
        A model from images [rows, 3, 32, 32] to logits.
    """
    one, two, three, four, five = (channels // shrink for channels in CHANNELS)
    hidden = 4096 // shrink
    return nn.Sequential(
        *(nn.Conv2d(3, one, 5, stride=2, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(one, two, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(two, three, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(three, four, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(four, five, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4)),
        nn.Flatten(),
        *(nn.Dropout(), nn.Linear(five, hidden), nn.ReLU()),
        *(nn.Dropout(), nn.Linear(hidden, hidden), nn.ReLU()),
        nn.Linear(hidden, classes),
    )
