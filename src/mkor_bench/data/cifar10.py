"""CIFAR-10: 32 by 32 colour images of 10 classes.

Local layout: ``cifar10/train.npz`` and ``test.npz``, each with ``images`` [n, 32, 32, 3] of uint8
and ``labels`` [n]. On the hub: ``uoft-cs/cifar10``.
"""

from __future__ import annotations

from functools import cache

from torch import Tensor

from mkor_bench.data.images import Arrays, Images, Layout, standardised
from mkor_bench.data.store import Store

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
"""Of each channel over the full training set."""

_ARRAYS = Arrays("CIFAR-10", "cifar10", "uoft-cs/cifar10", "img", Layout((32, 32, 3), 10))


@cache
def load_cifar10(store: Store) -> Images:
    """Loads the data set.

    Args:
        store: The data folder, or "hub".

    Returns:
        Images [n, 3, 32, 32] with pixels from 0 to 1, and their classes.

    Raises:
        UserError: It cannot be had there, or is not as documented.
    """
    return _ARRAYS.load(store)


def normalised(images: Tensor) -> Tensor:
    """Standardises pixels from 0 to 1, [n, 3, 32, 32], by the figures above."""
    return standardised(images, MEAN, STD)
