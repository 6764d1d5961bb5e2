"""The fields of a user's task, checked when it is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from mkor_bench.errors import UserError
from mkor_bench.optimizers import OPTIMIZERS
from mkor_bench.tasks.task import Task

_FUNCTIONS = ("build", "batches", "loss", "evaluate")
_TEXTS = ("name", "description", "metric")
# It becomes the name of a folder.
_NAME = re.compile(r"[\w+-][\w .+-]{0,99}")


def check_fields(task: Task) -> None:
    """Checks all that can be told without calling a function of the task.

    Args:
        task: What a user's function returned.

    Raises:
        UserError: A field is not what it should be.
    """
    for field in _FUNCTIONS:
        value = getattr(task, field)
        expect(callable(value), task, f"{field} must be a function", value)
    for field in _TEXTS:
        value = getattr(task, field)
        expect(isinstance(value, str), task, f"{field} must be a text", value)
    plain = "name must be of letters, digits, spaces and . + - _, since it names a folder"
    expect(_NAME.fullmatch(task.name) is not None, task, plain, task.name)
    _check_numbers(task)


def expect(holds: bool, task: Task, rule: str, value: Any) -> None:
    """Raises the error of a task that breaks a rule.

    Args:
        holds: Whether the rule holds.
        task: The task.
        rule: The rule in words, and the remedy where the rule does not say it.
        value: What is there instead.

    Raises:
        UserError: The rule does not hold.
    """
    if not holds:
        got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise UserError(f"task {task.name!r}: {rule}; got {got[:80]}.")


def _check_numbers(task: Task) -> None:
    whole = isinstance(task.steps, int) and not isinstance(task.steps, bool) and task.steps >= 1
    expect(whole, task, "steps must be a whole number of at least 1", task.steps)
    rule = "higher_is_better must be True or False"
    expect(isinstance(task.higher_is_better, bool), task, rule, task.higher_is_better)
    some = isinstance(task.lrs, Sequence) and len(task.lrs) > 0
    positive = some and all(map(_is_lr, task.lrs))
    rule = "lrs must be positive numbers, at least one, such as (0.01, 0.1)"
    expect(positive, task, rule, task.lrs)
    named = isinstance(task.default_lrs, Mapping) and all(
        name in OPTIMIZERS and _is_lr(lr) for name, lr in task.default_lrs.items()
    )
    rule = "default_lrs must give positive numbers for optimizers, such as {'mkor': 0.1}"
    expect(named, task, rule, task.default_lrs)


def _is_lr(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value) and value > 0
