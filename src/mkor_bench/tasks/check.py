"""One trial of a user's task, so that its mistakes show before any work begins."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mkor_bench.errors import UserError
from mkor_bench.tasks.source import TaskSource, where
from mkor_bench.tasks.task import Task


def check_task(source: TaskSource) -> None:
    """Builds a user's model once, and takes its loss, gradient and test metric.

    Built-in tasks have tests of their own and are not tried.

    Args:
        source: Where the task comes from.

    Raises:
        UserError: A function of the task raises, or returns what it should not.
    """
    if not source.is_users:
        return
    task = source.load()
    _check_fields(task)
    path = Path(source.text.rpartition(":")[0])
    part = "build"
    try:
        torch.manual_seed(0)
        model = task.build(0)
        _expect(isinstance(model, nn.Module), task, "build must return a torch.nn.Module", model)
        part = "batches"
        batch = _first_batch(task)
        part = "loss"
        _check_loss(task, task.loss(model, batch))
        part = "evaluate"
        with torch.no_grad():
            metric = task.evaluate(model.eval())
        _expect(isinstance(metric, (int, float)), task, "evaluate must return a number", metric)
    except UserError:
        raise
    except Exception as error:
        told = where(error, path)
        raise UserError(f"task {task.name!r} failed in its {part}: {told}.") from error


def _check_fields(task: Task) -> None:
    for field in ("build", "batches", "loss", "evaluate"):
        value = getattr(task, field)
        _expect(callable(value), task, f"{field} must be a function", value)
    for field in ("name", "description", "metric"):
        value = getattr(task, field)
        _expect(isinstance(value, str), task, f"{field} must be a text", value)


def _first_batch(task: Task) -> Any:
    batches = task.batches(0)
    endless = "batches must return an endless iterator, such as a generator"
    _expect(isinstance(batches, Iterator), task, endless, batches)
    try:
        return next(batches)
    except StopIteration:
        raise UserError(f"task {task.name!r}: {endless}; it gave no batch at all.") from None


def _check_loss(task: Task, loss: Any) -> None:
    scalar = isinstance(loss, Tensor) and loss.ndim == 0
    _expect(scalar, task, "loss must return a scalar tensor", loss)
    _expect(loss.requires_grad, task, "loss must depend on the model's parameters", loss)
    _expect(math.isfinite(loss.item()), task, "loss must be finite on a new model", loss)


def _expect(holds: bool, task: Task, rule: str, value: Any) -> None:
    if not holds:
        got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        if isinstance(value, Tensor) and value.ndim == 0:
            got = repr(value.item())
        raise UserError(f"task {task.name!r}: {rule}; got {got[:80]}.")
