"""Photographs of any size as crops of one size, made by several threads ahead of their use."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mkor_bench.data.images import standardised

Item = TypeVar("Item")
Result = TypeVar("Result")

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
"""Of each channel over ImageNet's training photographs."""

_AREA, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
_TRIES = 10
_KEPT = 224 / 256
"""How much of the shorter side a central crop keeps."""


def cropped(image: Any, seed: int, side: int) -> Tensor:
    """Takes a random part of a photograph, mirrored or not.

    Its area is 8 to 100 % of the whole and its sides are in a ratio of 3:4 to 4:3, as usual on
    ImageNet; where ten tries find none, it is the central crop.

    Args:
        image: Of Pillow.
        seed: Fixes what is taken.
        side: Pixels of the result.

    Returns:
        [3, side, side], normalised.
    """
    generator = torch.Generator().manual_seed(seed)
    mirrored = float(torch.rand((), generator=generator)) < 0.5
    for area, ratio, right, down in torch.rand(_TRIES, 4, generator=generator).tolist():
        box = _box(image.size, area, ratio, right, down)
        if box is not None:
            pixels = _scaled(image, box, side)
            return pixels.flip(2) if mirrored else pixels
    return central(image, side)


def central(image: Any, side: int) -> Tensor:
    """Takes the middle of a photograph, 7/8 of its shorter side; see :func:`cropped`."""
    kept = min(image.size) * _KEPT
    left, top = ((length - kept) / 2 for length in image.size)
    return _scaled(image, (left, top, left + kept, top + kept), side)


def stacked(rows: Iterable[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Makes a batch: images [rows, 3, side, side] and their classes [rows]."""
    images, labels = zip(*rows, strict=True)
    return torch.stack(images), torch.tensor(labels)


def ahead(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Applies a function in threads, a little ahead of what is asked for.

    Args:
        function: What to do; it must depend on its argument alone.
        items: What to do it to, in this order; may be endless.

    Yields:
        The results in the same order.
    """
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4
    left = iter(items)
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[Result]] = deque()
        try:
            waiting.extend(pool.submit(function, item) for item in islice(left, 4 * threads))
            while waiting:
                yield waiting.popleft().result()
                waiting.extend(pool.submit(function, item) for item in islice(left, 1))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _box(
    size: tuple[int, int], area: float, ratio: float, right: float, down: float
) -> tuple[float, float, float, float] | None:
    """Turns four numbers from 0 to 1 into a part of an image, or None where it is too large."""
    width, height = size
    part = width * height * (_AREA[0] + area * (_AREA[1] - _AREA[0]))
    logs = [math.log(limit) for limit in _RATIO]
    shape = math.exp(logs[0] + ratio * (logs[1] - logs[0]))
    wide, high = math.sqrt(part * shape), math.sqrt(part / shape)
    if wide > width or high > height:
        return None
    left, top = right * (width - wide), down * (height - high)
    return left, top, left + wide, top + high


def _scaled(image: Any, box: tuple[float, float, float, float], side: int) -> Tensor:
    from PIL.Image import Resampling

    small = image.resize((side, side), Resampling.BILINEAR, box=box)
    pixels = torch.from_numpy(np.array(small)).permute(2, 0, 1).float() / 255
    return standardised(pixels, MEAN, STD)
