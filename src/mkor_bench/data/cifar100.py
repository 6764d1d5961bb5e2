"""CIFAR-100: 32 by 32 colour images of 100 classes in 20 groups.

Local layout: ``cifar100/train_0.png`` to ``train_3.png`` and ``test_0.png``, each a grid of 32 by
32 tiles, 50 a row, row by row; ``labels.npz`` with ``train_fine``, ``train_coarse``,
``test_fine`` and ``test_coarse``. On the hub: ``uoft-cs/cifar100``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from mkor_bench.data.images import Images, Layout, Split, read_arrays, standardised
from mkor_bench.data.store import BLANK, Store, from_hub, local_files, need_store, reading, unfit

MEAN = (0.5071, 0.4865, 0.4409)
STD = (0.2673, 0.2564, 0.2762)
"""Of each channel over the full training set."""

_TILE, _COLUMNS = 32, 50
_LAYOUTS = {"fine": Layout((_TILE, _TILE, 3), 100), "coarse": Layout((_TILE, _TILE, 3), 20)}
_TRAIN = tuple(f"train_{part}.png" for part in range(4))


@cache
def load_cifar100(store: Store, labels: Literal["fine", "coarse"] = "fine") -> Images:
    """Loads the data set.

    Args:
        store: The data folder, or "hub".
        labels: 100 "fine" classes or 20 "coarse" ones.

    Returns:
        Images [n, 3, 32, 32] with pixels from 0 to 1, and their classes.

    Raises:
        UserError: It cannot be had there, or is not as documented.
    """
    place = need_store(store, "CIFAR-100")
    if place == BLANK:
        return _LAYOUTS[labels].blank()
    if not isinstance(place, Path):
        return Images(_from_hub("train", labels), _from_hub("test", labels))
    *train, test, classes = local_files(place, "cifar100", *_TRAIN, "test_0.png", "labels.npz")
    names = [f"{part}_{labels}" for part in ("train", "test")]
    images = [np.concatenate([_tiles(path) for path in grids]) for grids in (train, [test])]
    return Images(
        *(
            _LAYOUTS[labels].split(tiles, stored, f"{name} of {str(classes)!r}")
            for name, tiles, stored in zip(names, images, read_arrays(classes, *names), strict=True)
        )
    )


def normalised(images: Tensor) -> Tensor:
    """Standardises pixels from 0 to 1, [n, 3, 32, 32], by the figures above."""
    return standardised(images, MEAN, STD)


def _tiles(path: Path) -> Any:
    """Cuts a grid into images, [n, 32, 32, 3]."""
    from PIL import Image

    rule = f"it must be an RGB image of 32 by 32 tiles, {_COLUMNS} a row"
    with reading(path, rule), Image.open(path) as opened:
        (width, height), mode, grid = opened.size, opened.mode, np.asarray(opened)
    if mode != "RGB" or width != _COLUMNS * _TILE or height % _TILE:
        raise unfit(repr(str(path)), f"it is {mode}, {width} by {height}", rule)
    rows = grid.reshape(height // _TILE, _TILE, _COLUMNS, _TILE, 3)
    return rows.swapaxes(1, 2).reshape(-1, _TILE, _TILE, 3)


def _from_hub(part: str, labels: Literal["fine", "coarse"]) -> Split:
    rows = from_hub("uoft-cs/cifar100", None, part)
    images = np.stack([np.asarray(image) for image in rows["img"]])
    place = f"the {part} part of 'uoft-cs/cifar100'"
    return _LAYOUTS[labels].split(images, rows[f"{labels}_label"], place)
