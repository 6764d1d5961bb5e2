"""A user's task whose mistakes are told in one line, at whichever step they show.

The four functions are wrapped where the task is loaded, so that the trial before a run,
training, comparisons and worker processes all tell the same mistake in the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mkor_bench.errors import UserError, where
from mkor_bench.tasks.fields import check_fields, expect
from mkor_bench.tasks.task import Task

Result = TypeVar("Result")

NUMERICAL = (torch.linalg.LinAlgError, FloatingPointError)
"""Errors of the numbers and not of the code: in training, they count as divergence."""

_ENDLESS = "batches must return an endless iterator, such as a generator"


def guarded(task: Task, path: Path) -> Task:
    """Wraps the functions of a task.

    Args:
        task: The user's task.
        path: The file that it comes from.

    Returns:
        The same task, whose functions raise UserError where they fail or return what
        they should not.

    Raises:
        UserError: A field is not what it should be.
    """
    check_fields(task)

    def build(seed: int) -> nn.Module:
        model = call(task, path, "build", lambda: task.build(seed))
        expect(isinstance(model, nn.Module), task, "build must return a torch.nn.Module", model)
        trained = any(parameter.requires_grad for parameter in model.parameters())
        expect(trained, task, "build must return a model with parameters to train", model)
        return model

    def batches(seed: int) -> Iterator[Any]:
        made = call(task, path, "batches", lambda: task.batches(seed))
        expect(isinstance(made, Iterator), task, _ENDLESS, made)
        return _Batches(task, path, made)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = call(task, path, "loss", lambda: task.loss(model, batch))
        scalar = isinstance(value, Tensor) and value.ndim == 0
        expect(scalar, task, "loss must return a scalar tensor", value)
        expect(value.requires_grad, task, "loss must depend on the model's parameters", value)
        return value

    def evaluate(model: nn.Module) -> float:
        value: Any = call(task, path, "evaluate", lambda: task.evaluate(model))
        is_number = isinstance(value, Real) or (isinstance(value, Tensor) and value.ndim == 0)
        expect(is_number, task, "evaluate must return a number", value)
        return float(value)

    return replace(task, build=build, batches=batches, loss=loss, evaluate=evaluate)


def call(task: Task, path: Path, part: str, function: Callable[[], Result]) -> Result:
    """Calls a part of a task.

    Args:
        task: The user's task.
        path: The file that it comes from.
        part: What it does, in a word.
        function: Does it.

    Returns:
        What the function returns.

    Raises:
        UserError: It raised; the message says where.
    """
    try:
        return function()
    except (UserError, StopIteration):
        raise
    except (Exception, SystemExit) as error:
        if part == "loss" and isinstance(error, NUMERICAL):
            raise
        raise failure(task, path, part, error) from error


def failure(task: Task, path: Path, part: str, error: BaseException) -> UserError:
    """Returns the error that tells where a part of a task failed."""
    return UserError(f"task {task.name!r} failed in its {part}: {where(error, path)}.")


class _Batches(Iterator[Any]):
    def __init__(self, task: Task, path: Path, made: Iterator[Any]) -> None:
        self._next = lambda: call(task, path, "batches", lambda: next(made))

    def __next__(self) -> Any:
        return self._next()
