"""scikit-learn's digits: 1,797 grey images of 8 by 8 pixels, installed with it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

TEST_ROWS = 360
"""About a fifth of the images; the rest are for training."""


@dataclass(frozen=True)
class Digits:
    """The data set, split once and for all.

    Attributes:
        train_images: Training images, [1437, 64], pixels from 0 to 1.
        train_labels: Their digits, [1437].
        test_images: Test images, [360, 64].
        test_labels: Their digits, [360].
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@cache
def load_digits() -> Digits:
    """Loads the data set; the split is the same in every run and for every seed."""
    from sklearn.datasets import load_digits as load

    images, labels = load(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    pixels = (torch.from_numpy(images).float() / 16)[order]
    digits = torch.from_numpy(labels).long()[order]
    return Digits(
        train_images=pixels[TEST_ROWS:],
        train_labels=digits[TEST_ROWS:],
        test_images=pixels[:TEST_ROWS],
        test_labels=digits[:TEST_ROWS],
    )
