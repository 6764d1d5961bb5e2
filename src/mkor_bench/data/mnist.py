"""MNIST: 28 by 28 grey images of digits.

Local layout: ``mnist_t10k/train.npz`` and ``test.npz``, each with ``images`` [n, 28, 28] of uint8
and ``labels`` [n]. On the hub: ``ylecun/mnist``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mkor_bench.data.images import Images, Split
from mkor_bench.data.store import Store, from_hub, local_files, need_store


@cache
def load_mnist(store: Store) -> Images:
    """Loads the data set.

    Args:
        store: The data folder, or "hub".

    Returns:
        Images [n, 1, 28, 28] with pixels from 0 to 1, and their digits.

    Raises:
        UserError: It cannot be had there.
    """
    place = need_store(store, "MNIST")
    if isinstance(place, Path):
        paths = local_files(place, "mnist_t10k", "train.npz", "test.npz")
        train, test = (_split(**np.load(path, allow_pickle=False)) for path in paths)
    else:
        train, test = (_from_hub(split) for split in ("train", "test"))
    return Images(train, test)


def _from_hub(split: str) -> Split:
    rows = from_hub("ylecun/mnist", None, split)
    return _split(np.stack([np.asarray(image) for image in rows["image"]]), rows["label"])


def _split(images: Any, labels: Any) -> Split:
    return Split(
        torch.from_numpy(images).float()[:, None] / 255, torch.as_tensor(np.asarray(labels)).long()
    )
