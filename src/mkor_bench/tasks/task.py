"""What a task is: everything about a training problem but the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

DEFAULT_LRS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
"""The common grid: wide enough for SGD and AdamW alike, about three values a decade."""


@dataclass(frozen=True)
class Task:
    """A training problem that any optimizer can be tried on.

    The functions get all randomness from their seed (or from the global generators,
    which a run seeds before it calls ``build``), so that a run can be repeated and
    continued exactly.

    Attributes:
        name: The name in tables, files and checkpoints.
        description: One sentence.
        build: Makes a new model from a seed.
        batches: Makes an endless iterator of training batches from a seed. The same
            seed gives the same batches in the same order.
        loss: The training loss of a model on a batch, a scalar tensor.
        evaluate: The test metric of a model, which is in evaluation mode and without
            gradients at that time.
        metric: What ``evaluate`` returns, such as ``"test accuracy"``.
        higher_is_better: Whether a larger metric is a better one.
        steps: How many steps a run takes unless told otherwise.
        lrs: The grid of learning rates of a comparison unless told otherwise.
        default_lrs: The learning rate of a single training with an optimizer, by the
            optimizer's name, unless told otherwise.
    """

    name: str
    description: str
    build: Callable[[int], nn.Module]
    batches: Callable[[int], Iterator[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    evaluate: Callable[[nn.Module], float]
    metric: str
    higher_is_better: bool
    steps: int = 300
    lrs: tuple[float, ...] = DEFAULT_LRS
    default_lrs: Mapping[str, float] = field(default_factory=dict)
