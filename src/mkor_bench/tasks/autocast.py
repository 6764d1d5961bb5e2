"""A task in mixed precision: its products in bfloat16, its parameters and gradients in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mkor_bench.tasks.task import Task


def autocast(task: Task) -> Task:
    """Puts a task's loss and metric under bfloat16 autocast.

    Args:
        task: The task.

    Returns:
        The same one but for its precision.
    """

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with _lowered(model):
            return task.loss(model, batch).float()

    def evaluate(model: nn.Module) -> float:
        with _lowered(model):
            return task.evaluate(model)

    return replace(task, loss=loss, evaluate=evaluate)


@contextmanager
def _lowered(model: nn.Module) -> Iterator[None]:
    device = next(model.parameters()).device.type
    with torch.autocast(device, torch.bfloat16):
        if device != "cpu":
            yield
            return
        # A processor's fused attention goes back through bfloat16 slower than through float32.
        with sdpa_kernel(SDPBackend.MATH):
            yield
