"""Labelled images in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


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
