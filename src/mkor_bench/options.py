"""What the user typed, checked: each mistake names the value, the rule and the remedy."""

from __future__ import annotations

import math
import re

from mkor_bench.errors import UserError
from mkor_bench.optimizers import OptimizerRow, optimizer_row

MAX_SEEDS = 1000


def parse_optimizers(text: str) -> tuple[str, ...]:
    """Reads a list of optimizers.

    Args:
        text: Names with commas or spaces between them.

    Returns:
        The names, each once.

    Raises:
        UserError: A name is unknown, or its options are, or there is none.
    """
    names = parse_names(text, "--optimizers", "sgd,mkor")
    for name in names:
        _try_options(optimizer_row(name))
    return names


def parse_names(text: str, option: str, example: str) -> tuple[str, ...]:
    """Reads a list of names.

    Args:
        text: Names with commas or spaces between them.
        option: The option that they were given with.
        example: How to write some.

    Returns:
        The names, each once.

    Raises:
        UserError: There is none.
    """
    names = tuple(dict.fromkeys(_split(text)))
    if not names:
        raise UserError(f"{option} {text!r} names none: give names such as {example}.")
    return names


def parse_lrs(text: str) -> tuple[float, ...]:
    """Reads a grid of learning rates.

    Args:
        text: Numbers with commas or spaces between them.

    Returns:
        The numbers in ascending order, each once.

    Raises:
        UserError: One is not a positive number, or there is none.
    """
    words = _split(text)
    if not words:
        raise UserError(f"--lrs {text!r} has no learning rate: give some, such as 0.001,0.01,0.1.")
    return tuple(sorted({check_lr(word, "--lrs") for word in words}))


def check_lr(value: str | float, option: str) -> float:
    """Checks a learning rate.

    Args:
        value: A number, or the text of one.
        option: The option that it was given with.

    Returns:
        The number.

    Raises:
        UserError: It is not a positive, finite number.
    """
    try:
        lr = float(value)
    except ValueError:
        lr = math.nan
    if not (math.isfinite(lr) and lr > 0):
        raise UserError(
            f"learning rate {value} in {option} must be a positive number: give one such as 0.01."
        )
    return lr


def parse_whole(text: str, option: str) -> int:
    """Reads a whole number.

    Args:
        text: The number as typed.
        option: The option that it was given with.

    Returns:
        The number.

    Raises:
        UserError: It is something else.
    """
    try:
        return int(text)
    except ValueError:
        raise UserError(
            f"{option} must be a whole number, got {text!r}: give one such as 100."
        ) from None


def check_count(value: int, option: str, least: int = 1, most: int | None = None) -> int:
    """Checks a whole number.

    Args:
        value: The number.
        option: The option that it was given with.
        least: The smallest that makes sense.
        most: The largest that makes sense, if there is one.

    Returns:
        The number.

    Raises:
        UserError: It is out of range.
    """
    if value < least or (most is not None and value > most):
        rule = f"at least {least}" if most is None else f"from {least} to {most}"
        raise UserError(
            f"{option} must be {rule}, got {value}: give such a number or leave the option out."
        )
    return value


def _try_options(row: OptimizerRow) -> None:
    """Builds an optimizer whose name carries options, so that its mistakes show at once."""
    if ":" in row.name:
        from torch import nn

        row.build(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 0.01)


def _split(text: str) -> list[str]:
    return [word for word in re.split(r"[,\s]+", text) if word]
