"""MNIST: 28 by 28 grey images of digits.

Local layout: ``mnist_t10k/train.npz`` and ``test.npz``, each with ``images`` [n, 28, 28] of uint8
and ``labels`` [n]. On the hub: ``ylecun/mnist``.
"""

from __future__ import annotations

from functools import cache

from mkor_bench.data.images import Arrays, Images, Layout
from mkor_bench.data.store import Store

_ARRAYS = Arrays("MNIST", "mnist_t10k", "ylecun/mnist", "image", Layout((28, 28), 10))


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
    return _ARRAYS.load(store)
