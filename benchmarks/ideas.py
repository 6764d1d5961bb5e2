"""Schedules of `mkor.auto`'s options that might pay, beside its constants.

    MKOR_DATA=FOLDER python benchmarks/ideas.py           # prints and stores

Every idea trains with the learning rate, the seeds and the target that `mkor study defaults` found
for the constants (`benchmarks/results/study/defaults.json`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from variants import compare_variants

import mkor
from mkor_bench.train import Training, warmup_cosine


def falling(start: float, end: float, steps: int) -> Callable[[int], float]:
    """From `start` to `end` by a constant factor a step over `steps` steps."""
    return lambda step: end * (start / end) ** max(0.0, 1 - step / steps)


def changed(early: int, late: int, at: float) -> Callable[[int], int]:
    """`early` before step `at`, and `late` from there on."""
    return lambda step: early if step < at else late


def inverse(part: float) -> Callable[[int], float]:
    """0.003, and a part of the inverse of the number of steps: few samples are less certain."""
    return lambda step: 0.003 + part / (step + 1)


IDEAS: Mapping[str, Callable[[int], dict[str, Any]]] = {
    "constants (taken)": lambda steps: {},
    "damping falls from 0.1": lambda steps: {"damping": falling(0.1, 0.003, steps // 5)},
    "damping falls to 0.001": lambda steps: {"damping": falling(0.01, 0.001, steps)},
    "damping rises to 0.01": lambda steps: {"damping": falling(0.001, 0.01, steps)},
    "damping + 0.1 by steps": lambda steps: {"damping": inverse(0.1)},
    "damping + 0.3 by steps": lambda steps: {"damping": inverse(0.3)},
    "every step then 10": lambda steps: {"factor_update_steps": changed(1, 10, 0.2 * steps)},
    "100 steps then 10": lambda steps: {"warmup_steps": 100, "factor_update_steps": 10},
    "every 10 then 2": lambda steps: {"factor_update_steps": changed(10, 2, 0.5 * steps)},
    "rank 20": lambda steps: {"rank": 20},
    "rank 20 and 100 steps then 10": lambda steps: {
        "rank": 20,
        "warmup_steps": 100,
        "factor_update_steps": 10,
    },
    "vectors 64": lambda steps: {"vectors": 64},
    "vectors 64 and rank 80": lambda steps: {"vectors": 64, "rank": 80},
}


def apply(training: Training, idea: Callable[[int], dict[str, Any]]) -> None:
    """Train with the options of an idea instead."""
    usual: Any = training.optimizer
    usual.close()
    options = idea(training.settings.steps)
    training.optimizer = mkor.auto(training.model, training.settings.lr, **options)
    training.scheduler = LambdaLR(training.optimizer, warmup_cosine(training.settings.steps))


if __name__ == "__main__":
    compare_variants(__doc__.splitlines()[0], IDEAS, apply, "ideas.json")
