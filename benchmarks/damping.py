"""Dampings that a layer finds by its own spectrum, against one damping for all, in mkor.auto.

    MKOR_DATA=... python benchmarks/damping.py
    MKOR_DATA=... python benchmarks/damping.py --tasks shakespeare --variants fixed,noise

λ are the eigenvalues that are kept of a side's covariance in parts of its trace, d is the side, k
their number. What they leave, 1 - Σλ, is spread over d - k directions: "noise" takes that level for
the damping, as probabilistic PCA does, above a least one. Three seeds at one learning rate a task,
the rate that is best with the fixed damping in the study of defaults; the final loss, and the steps
to the final loss of AdamW in that study.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from variants import compare_variants

from mkor.factors.lowrank import LowRank
from mkor_bench.train import Training

Rule = Callable[[Tensor, int], Tensor]
"""The damping [G] of λ [G, k] and d."""


def fixed(value: float) -> Rule:
    """One for all."""
    return lambda values, side: torch.full_like(values[:, 0], value)


def noise(part: float, least: float) -> Rule:
    """A part of the mean of the eigenvalues that are not kept, above a least damping."""

    def rule(values: Tensor, side: int) -> Tensor:
        left = (1 - values.sum(dim=1)).clamp_min(0)
        return least + part * left / max(side - values.shape[1], 1)

    return rule


def squares(part: float) -> Rule:
    """A part of the sum of squares, which is the mean eigenvalue that a row meets."""
    return lambda values, side: part * values.square().sum(dim=1)


RULES: dict[str, Rule] = {
    "fixed": fixed(0.003),
    "noise": noise(1, 0.003),
    "noise above 0.001": noise(1, 0.001),
    "3 noise above 0.001": noise(3, 0.001),
    "median": lambda values, side: values.median(dim=1).values,
    "geometric mean": lambda values, side: values.clamp_min(1e-6).log().mean(dim=1).exp(),
    "0.01 sum of squares": squares(0.01),
    "0.013 sum of squares": squares(0.013),
    "0.02 sum of squares": squares(0.02),
}


def apply(training: Training, rule: Rule) -> None:
    """Let layers take their damping by a rule."""
    LowRank.level = lambda self, relative, side: rule(relative.square(), side)  # type: ignore


if __name__ == "__main__":
    compare_variants(__doc__.splitlines()[0], RULES, apply, "damping.json")
