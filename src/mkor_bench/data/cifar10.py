"""CIFAR-10: 32 by 32 colour images of 10 classes.

Local layout: ``cifar10/train.npz`` and ``test.npz``, each with ``images`` [n, 32, 32, 3] of uint8
and ``labels`` [n]. On the hub: ``uoft-cs/cifar10``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from torch import Tensor

from mkor_bench.data.images import Images, Layout, Split, read_arrays, standardised
from mkor_bench.data.store import BLANK, Store, from_hub, local_files, need_store

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
"""Of each channel over the full training set."""

_LAYOUT = Layout((32, 32, 3), 10)


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
    place = need_store(store, "CIFAR-10")
    if place == BLANK:
        return _LAYOUT.blank()
    if isinstance(place, Path):
        train, test = map(_read, local_files(place, "cifar10", "train.npz", "test.npz"))
    else:
        train, test = (_from_hub(split) for split in ("train", "test"))
    return Images(train, test)


def normalised(images: Tensor) -> Tensor:
    """Standardises pixels from 0 to 1, [n, 3, 32, 32], by the figures above."""
    return standardised(images, MEAN, STD)


def _read(path: Path) -> Split:
    images, labels = read_arrays(path, "images", "labels")
    return _LAYOUT.split(images, labels, repr(str(path)))


def _from_hub(split: str) -> Split:
    rows = from_hub("uoft-cs/cifar10", None, split)
    images = np.stack([np.asarray(image) for image in rows["img"]])
    return _LAYOUT.split(images, rows["label"], f"the {split} part of 'uoft-cs/cifar10'")
