"""Labelled images in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mkor_bench.data.store import (
    BLANK,
    Store,
    from_hub,
    local_files,
    need_store,
    reading,
    unfit,
)

_BLANK_ROWS = 1_024


@dataclass(frozen=True)
class Split:
    """The training part of a data set, or the test part.

    Attributes:
        images: [n, channels, height, width], float32.
        labels: [n], int64.
    """

    images: Tensor
    labels: Tensor

    def head(self, rows: int) -> Split:
        """Returns the first rows, for a quick look."""
        return Split(self.images[:rows], self.labels[:rows])

    def map(self, change: Callable[[Tensor], Tensor]) -> Split:
        """Returns the images changed by a function, with the same labels."""
        return Split(change(self.images), self.labels)


@dataclass(frozen=True)
class Images:
    """A data set of labelled images.

    Attributes:
        train: What may be trained on.
        test: What is only ever measured on.
    """

    train: Split
    test: Split


class Layout(NamedTuple):
    """What the arrays of a data set must be.

    Attributes:
        shape: Of an image: height and width, and channels of a coloured one.
        classes: How many.
    """

    shape: tuple[int, ...]
    classes: int

    @property
    def rule(self) -> str:
        """The same in words."""
        return (
            f"images must be uint8 [n, {', '.join(map(str, self.shape))}] and labels n whole "
            f"numbers from 0 to {self.classes - 1}, with n at least 1"
        )

    def split(self, images: Any, labels: Any, place: str) -> Split:
        """Makes a split of arrays as they are stored.

        Args:
            images: Pixels from 0 to 255, [n, *shape].
            labels: [n].
            place: Where they come from, for the error.

        Returns:
            Images with channels first and pixels from 0 to 1, and their classes.

        Raises:
            UserError: They are not what they must be.
        """
        images, labels = np.asarray(images), np.asarray(labels)
        problem = self._problem(images, labels)
        if problem:
            raise unfit(place, problem, self.rule)
        pixels = torch.from_numpy(images).float() / 255
        pixels = pixels[:, None] if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2)
        return Split(pixels, torch.from_numpy(labels.astype(np.int64)))

    def blank(self) -> Images:
        """Makes up black images of these sizes, for checks of shapes.

        Returns:
            A few batches' worth in each part.
        """
        labels = np.arange(_BLANK_ROWS) % self.classes
        split = self.split(np.zeros((_BLANK_ROWS, *self.shape), np.uint8), labels, BLANK)
        return Images(split, split)

    def _problem(self, images: Any, labels: Any) -> str | None:
        if images.dtype != np.uint8 or images.shape[1:] != self.shape or not len(images):
            return f"images are {_kind(images)}"
        if not np.issubdtype(labels.dtype, np.integer) or labels.shape != images.shape[:1]:
            return f"labels are {_kind(labels)} for {len(images)} images"
        wrong = ((labels < 0) | (labels >= self.classes)).nonzero()[0]
        return f"label {wrong[0]} is {labels[wrong[0]]}" if len(wrong) else None


def standardised(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Subtracts the mean of each channel and divides by its standard deviation.

    Args:
        images: Pixels from 0 to 1, [..., channels, height, width].
        mean: Of each channel.
        std: Of each channel.

    Returns:
        The same shape.
    """
    means, stds = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    return (images - means) / stds


def read_arrays(path: Path, *names: str) -> list[Any]:
    """Reads arrays of an ``.npz`` file.

    Args:
        path: The file.
        names: Which.

    Returns:
        The NumPy arrays.

    Raises:
        UserError: The file is damaged or lacks one.
    """
    rule = f"it must be an .npz file with {' and '.join(names)}"
    # Opened here, since NumPy leaves what is no archive open.
    with reading(path, rule), path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
        return [stored[name] for name in names]


class Arrays(NamedTuple):
    """A data set whose parts are arrays: ``train.npz`` and ``test.npz`` of a folder, or the hub's.

    Attributes:
        title: What errors call it.
        folder: In the data folder.
        hub: Its name on the hub.
        column: Of the images there.
        layout: What the arrays must be.
    """

    title: str
    folder: str
    hub: str
    column: str
    layout: Layout

    def load(self, store: Store) -> Images:
        """Loads it.

        Args:
            store: The data folder, or "hub".

        Returns:
            Images with channels first and pixels from 0 to 1, and their classes.

        Raises:
            UserError: It cannot be had there, or is not as documented.
        """
        place = need_store(store, self.title)
        if place == BLANK:
            return self.layout.blank()
        if isinstance(place, Path):
            files = local_files(place, self.folder, "train.npz", "test.npz")
            return Images(*map(self._read, files))
        return Images(*(self._from_hub(part) for part in ("train", "test")))

    def _read(self, path: Path) -> Split:
        images, labels = read_arrays(path, "images", "labels")
        return self.layout.split(images, labels, repr(str(path)))

    def _from_hub(self, part: str) -> Split:
        rows = from_hub(self.hub, None, part)
        images = np.stack([np.asarray(image) for image in rows[self.column]])
        return self.layout.split(images, rows["label"], f"the {part} part of {self.hub!r}")


def _kind(array: Any) -> str:
    return f"{array.dtype} {list(array.shape)}"
