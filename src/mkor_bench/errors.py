"""Mistakes of the user, told in one line: the value, the rule, the remedy."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable
from pathlib import Path


class UserError(Exception):
    """Something that the user asked for cannot be done; the message is all they need."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """Builds the error for a name that is not registered.

    Args:
        kind: What the name should denote, such as ``"optimizer"``.
        name: The name as given.
        known: The registered names.

    Returns:
        An error that suggests the nearest names, or all of them when none is near.
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        hint = f"did you mean {' or '.join(repr(n) for n in near)}?"
    else:
        hint = f"choose from {', '.join(names)}."
    return UserError(f"unknown {kind} {name!r}: {hint}")


def where(error: BaseException, path: Path) -> str:
    """Tells an error of the user's file in one line, with the line that it arose on.

    Args:
        error: What was raised.
        path: The user's file.

    Returns:
        The line of the file where known, the error's type and its message.
    """
    message = " ".join(str(error).split()) or "no message"
    told = f"{type(error).__name__}: {message}".rstrip(".")
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if Path(f.filename).resolve() == path.resolve()]
    return f"line {lines[-1]}: {told}" if lines else told
