"""Warnings that point at the line of the user which caused them."""

from __future__ import annotations

import sys
import warnings

BETWEEN = ("mkor", "torch", "contextlib", "functools")
"""Packages whose frames may lie between a user's line and a warning."""


def warn(text: str) -> None:
    """Warn at the nearest caller outside of this package and torch."""
    level, frame = 2, sys._getframe(1)  # of `warnings.warn`, 2 is our own caller
    while frame.f_back is not None and package(frame.f_globals) in BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)


def package(names: dict[str, object]) -> str:
    """The package that a module's global names belong to."""
    return str(names.get("__name__", "")).partition(".")[0]
