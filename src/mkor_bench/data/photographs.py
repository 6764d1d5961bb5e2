"""ImageNet, or any photographs in folders that are their classes: too many to keep in memory.

Local layout: ``imagenet/train/CLASS/*`` and ``imagenet/val/CLASS/*``, JPEG or PNG files among
others; the classes are numbered by their names. On the hub: ``ILSVRC/imagenet-1k``, which streams
and needs an account that has accepted its terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import torch

from mkor_bench.data.store import BLANK, Store, from_hub, need_store, reading, streamed
from mkor_bench.errors import UserError

Sample: TypeAlias = tuple[Callable[[], Any], int]
"""What opens a photograph, as Pillow's image of three colours, and its class."""

_HUB = "ILSVRC/imagenet-1k"
_SHUFFLED_TOGETHER = 2_000
"""Photographs of the stream of which one is drawn; the order of its files is shuffled as well."""

_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"})


@dataclass(frozen=True)
class Photographs:
    """A data set.

    Attributes:
        train: Makes an endless stream of training samples from a seed, each epoch anew.
        test: Makes the stream of test samples, once through.
        classes: How many.
    """

    train: Callable[[int], Iterator[Sample]]
    test: Callable[[], Iterator[Sample]]
    classes: int


@cache
def load_photographs(store: Store) -> Photographs:
    """Finds the data set; photographs are read when they are needed.

    Args:
        store: The data folder, or "hub".

    Returns:
        The data set.

    Raises:
        UserError: It cannot be had there, or a test class is in no training folder.
    """
    place = need_store(store, "ImageNet")
    if place == BLANK:
        return _blank()
    if isinstance(place, Path):
        return _in_folders(place / "imagenet")
    return _on_hub()


def _blank() -> Photographs:
    from PIL import Image

    sample: Sample = (lambda: Image.new("RGB", (500, 375))), 0
    return Photographs(lambda seed: (sample for _ in count()), lambda: iter([sample]), 1000)


def _in_folders(folder: Path) -> Photographs:
    names = sorted(path.name for path in folder.glob("train/*") if path.is_dir())
    numbers = {name: number for number, name in enumerate(names)}
    train, test = (_photographs(folder, part) for part in ("train", "val"))
    unknown = {path.parent.name for path in test} - set(numbers)
    if unknown:
        raise UserError(
            f"{str(folder / 'val')!r} has a class {min(unknown)!r} that train lacks: give both the "
            "same folders."
        )

    def sample(path: Path) -> Sample:
        return (lambda: _open(path)), numbers[path.parent.name]

    def shuffled(seed: int) -> Iterator[Sample]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            for row in torch.randperm(len(train), generator=generator).tolist():
                yield sample(train[row])

    return Photographs(shuffled, lambda: map(sample, test), len(names))


def _photographs(folder: Path, part: str) -> list[Path]:
    paths = (path for path in folder.glob(f"{part}/*/*") if path.suffix.lower() in _SUFFIXES)
    found = sorted(paths)
    if not found:
        raise UserError(
            f"{str(folder)!r} lacks photographs in {part}/CLASS: name a data folder that has "
            "them in imagenet with --data, or stream the original with --data hub."
        )
    return found


def _open(path: Path) -> Any:
    from PIL import Image

    with reading(path, "it must be a photograph that Pillow reads"), Image.open(path) as opened:
        return opened.convert("RGB")


def _on_hub() -> Photographs:
    rows, tested = (from_hub(_HUB, None, part, streaming=True) for part in ("train", "validation"))

    def sample(row: Any) -> Sample:
        return (lambda: row["image"].convert("RGB")), int(row["label"])

    def shuffled(seed: int) -> Iterator[Sample]:
        stream = rows.shuffle(seed=seed, buffer_size=_SHUFFLED_TOGETHER)
        for epoch in count():
            stream.set_epoch(epoch)
            yield from map(sample, streamed(stream, _HUB))

    return Photographs(shuffled, lambda: map(sample, streamed(tested, _HUB)), 1000)
