"""Mistakes of the user, told in one line: the value, the rule, the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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
