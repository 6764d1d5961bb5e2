"""Checks of single values: each error names the value, the rule and the remedy."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

DTYPES = (None, torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Dtypes of factors."""

Schedule = float | Callable[[int], float]
"""A number, or a function of the step."""


def require(name: str, value: object, good: bool, rule: str) -> None:
    """Raise ValueError unless `good`, naming the option, its value and the rule."""
    if not good:
        raise ValueError(f"{name}={value!r} is out of range: {name} must be {rule}")


def one_of(name: str, value: object, known: Iterable[object]) -> None:
    """Raise ValueError unless the value is a known one, naming the nearest."""
    options = list(known)
    if value in options and not (isinstance(value, bool) and True not in options):
        return
    near = difflib.get_close_matches(str(value), [str(option) for option in options], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"{name}={value!r} is unknown: choose from {', '.join(repr(o) for o in options)}{hint}"
    )


def is_count(value: object, least: int) -> bool:
    """Whether a value is an integer of at least `least`."""
    return is_number(value) and isinstance(value, Integral) and int(value) >= least


def is_number(value: object) -> bool:
    """Whether a value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


@dataclass(frozen=True)
class Checked:
    """A function of the step whose values are checked when they are used."""

    name: str
    function: Callable[[int], Any]
    good: Callable[[Any], bool]
    rule: str

    def __call__(self, step: int) -> Any:
        """The value at a step, or a ValueError that names both."""
        value = self.function(step)
        require(f"{self.name}({step})", value, self.good(value), self.rule)
        return value


def checked(name: str, value: Any, good: Callable[[Any], bool], rule: str) -> Any:
    """Check an option that is a value or a function of the step.

    Returns:
        The value, or the function, which is tried at step 0 and checks itself from then on.
    """
    if callable(value):
        function = Checked(name, value, good, rule)
        function(0)
        return function
    require(name, value, good(value), rule)
    return value


def scheduled(name: str, value: Any, good: Callable[[float], bool], rule: str) -> Any:
    """`checked` for a number; `good` sees finite numbers alone."""
    return checked(name, value, Finite(good), rule)


@dataclass(frozen=True)
class Finite:
    """A rule for numbers that no other value follows."""

    rule: Callable[[float], bool]

    def __call__(self, value: Any) -> bool:
        """Whether a value is a finite number that follows the rule."""
        return is_number(value) and self.rule(value)


def counted(name: str, value: Any) -> Any:
    """`checked` for a positive integer."""
    return checked(name, value, is_positive_count, "an integer of at least 1")


def weighted(name: str, value: Any) -> Any:
    """`checked` for the weight of the old value in a moving average."""
    return scheduled(name, value, fraction, "between 0 and 1, both excluded")


def is_positive_count(value: Any) -> bool:
    """Whether a value is an integer of at least 1."""
    return is_count(value, 1)


def positive(value: float) -> bool:
    """Whether a number is above 0."""
    return value > 0


def fraction(value: float) -> bool:
    """Whether a number is between 0 and 1, both excluded."""
    return 0 < value < 1


def above_one(value: float) -> bool:
    """Whether a number is above 1."""
    return value > 1


def share(value: float) -> bool:
    """Whether a number is at least 0 and below 1."""
    return 0 <= value < 1


def refuse_sparse(params: Iterable[Tensor], taker: str, why: str) -> None:
    """Raise RuntimeError if a gradient isn't dense.

    Args:
        params: Parameters with or without gradients.
        taker: Who would take them.
        why: Why it can't.
    """
    for p in params:
        if p.grad is not None and p.grad.layout != torch.strided:
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(p.shape)} is sparse; {taker} takes "
                f"dense ones only, as {why}. Give the parameter to torch.optim.SparseAdam, or "
                "build its layer with sparse=False"
            )
