"""MNIST: 28 by 28 grey images of digits.

Local layout: ``mnist_t10k/train.npz`` and ``test.npz``, each with ``images`` [n, 28, 28] of uint8
and ``labels`` [n]. On the hub: ``ylecun/mnist``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from mkor_bench.data.images import Images, Layout, Split, read_arrays
from mkor_bench.data.store import BLANK, Store, from_hub, local_files, need_store

_LAYOUT = Layout((28, 28), 10)


@cache
def load_mnist(store: Store) -> Images:
    """Loads the data set.

    Args:
        store: The data folder, or "hub".

    Returns:
        Images [n, 1, 28, 28] with pixels from 0 to 1, and their digits.

    Raises:
        UserError: It cannot be had there, or is not as documented.
    """
    place = need_store(store, "MNIST")
    if place == BLANK:
        return _LAYOUT.blank()
    if isinstance(place, Path):
        paths = local_files(place, "mnist_t10k", "train.npz", "test.npz")
        train, test = map(_read, paths)
    else:
        train, test = (_from_hub(split) for split in ("train", "test"))
    return Images(train, test)


def _read(path: Path) -> Split:
    images, labels = read_arrays(path, "images", "labels")
    return _LAYOUT.split(images, labels, repr(str(path)))


def _from_hub(split: str) -> Split:
    rows = from_hub("ylecun/mnist", None, split)
    images = np.stack([np.asarray(image) for image in rows["image"]])
    return _LAYOUT.split(images, rows["label"], f"the {split} part of 'ylecun/mnist'")
