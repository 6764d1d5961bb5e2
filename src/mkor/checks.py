"""Checks of single values: each error names the value, the rule and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

import torch

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
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> bool:
    """Whether a value is a finite number."""
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return real and abs(float(value)) < float("inf")  # type: ignore[arg-type]


def scheduled(name: str, value: object, good: Callable[[float], bool], rule: str) -> None:
    """Check an option that is a number or a function of the step, which is tried at step 0."""
    number = value(0) if callable(value) else value
    label = f"{name}(0)" if callable(value) else name
    require(label, number, is_number(number) and good(number), rule)  # type: ignore[arg-type]


def counted(name: str, value: object) -> None:
    """Check an option that is a positive integer or a function of the step, tried at step 0."""
    number = value(0) if callable(value) else value
    label = f"{name}(0)" if callable(value) else name
    require(label, number, is_count(number, 1), "an integer of at least 1")


def positive(value: float) -> bool:
    """Whether a number is above 0."""
    return value > 0


def fraction(value: float) -> bool:
    """Whether a number is between 0 and 1, both excluded."""
    return 0 < value < 1
