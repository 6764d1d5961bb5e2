"""What the optimizers of a recipe can be, and their options, held to what takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import SGD, AdamW

import mkor
from mkor_bench.errors import UserError
from mkor_bench.recipes.fields import Fields

BASES: Mapping[str, Callable[..., Any]] = {"sgd": SGD, "adamw": AdamW, "lamb": mkor.LAMB}
METHODS: Mapping[str, Callable[..., Any]] = {
    **{"MKOR": mkor.MKOR, "KFAC": mkor.KFAC, "Eva": mkor.Eva},
    **{"SNGD": mkor.SNGD, "HyLo": mkor.HyLo, "auto": mkor.auto},
}
DTYPES = ("float32", "float64", "bfloat16", "float16")
_OWN_KEYS = ("lr", "hybrid")
"""Parameters that are keys of an optimizer's own table."""
_NO_OPTIONS = (*_OWN_KEYS, "model", "base", "params", "clock")
"""Parameters that the training passes, or that no file can hold."""


def read_options(where: str, table: Mapping[str, Any], taker: Callable[..., Any]) -> dict[str, Any]:
    """Reads a table of options by the parameters of what takes them.

    Args:
        where: The file and the table, for messages.
        table: The table.
        taker: A class or function.

    Returns:
        The options as it takes them: dtypes of torch, and tuples where they are the default.

    Raises:
        UserError: It has no such option, or the value is of another type than the default.
    """
    parameters = inspect.signature(taker).parameters
    for key in table:
        if key in _OWN_KEYS:
            raise UserError(
                f"{where}: {key!r} is none of the options: move it to the optimizer's own table."
            )
    defaults = {key: p.default for key, p in parameters.items() if key not in _NO_OPTIONS}
    fields = Fields(where, table, defaults)
    return {key: _option(fields, key, value, defaults[key]) for key, value in table.items()}


@contextmanager
def refusals(where: str) -> Iterator[None]:
    """Tells what torch or mkor refuses within as a mistake of the file.

    Args:
        where: The file and the table.

    Raises:
        UserError: Something was refused.
    """
    try:
        yield
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        end = "" if message.endswith((".", "?")) else "."
        raise UserError(f"{where}: {message}{end}") from error


def _option(fields: Fields, key: str, value: Any, default: Any) -> Any:
    """Returns a value of the type that its default has; where that is None, the taker checks it."""
    if key.endswith("_dtype"):
        return getattr(torch, fields.choice(key, DTYPES))
    if isinstance(default, bool):
        return fields.take(key, bool, "true or false")
    if isinstance(default, (int, float)):
        return fields.number(key, "a finite number")
    if isinstance(default, str):
        return fields.text(key)
    if isinstance(default, tuple):
        return _items(fields, key, default)
    return value


def _items(fields: Fields, key: str, default: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns a list of texts, or of as many numbers as the default has."""
    rule = f"a list of {len(default)} numbers" if default else "a list of texts"
    items = tuple(fields.take(key, list, rule))
    types = {int, float} if default else {str}
    if {type(item) for item in items} - types or (default and len(items) != len(default)):
        raise fields.wrong(key, list(items), rule)
    return items
