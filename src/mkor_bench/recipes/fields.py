"""A table of a recipe, whose keys are known and whose values are checked one by one."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mkor_bench.errors import UserError

NEAR = 0.7
"""How alike two keys are, from 0 to 1, for one to be suggested in place of the other."""


class Fields:
    """A table of the file, with no key but known ones.

    Args:
        where: The file and the table, for messages.
        table: The table.
        known: The keys that it may have.

    Raises:
        UserError: It has another key. That is told first of all, since a key that is missing is
            often one that is misspelt.
    """

    def __init__(self, where: str, table: Mapping[str, Any], known: Collection[str]) -> None:
        self.where = where
        self._table = table
        for key in table:
            if key not in known:
                raise UserError(f"{where}: unknown key {key!r}: {_hint(key, known)}")

    def only(self, keys: Collection[str], taker: str) -> None:
        """Refuses known keys that a choice among the others has no use for.

        Args:
            keys: Those that remain.
            taker: What was chosen.

        Raises:
            UserError: There are others.
        """
        others = [key for key in self._table if key not in keys]
        if others:
            raise UserError(
                f"{self.where}: {taker} takes no {', '.join(others)}: leave out what is not one "
                f"of {', '.join(keys)}."
            )

    def take(
        self, key: str, kinds: type | tuple[type, ...], rule: str, *, default: Any = ...
    ) -> Any:
        """Takes a key's value.

        Args:
            key: The key.
            kinds: Its types; a truth value is a number only where it is asked for.
            rule: What it must be, in words.
            default: Where it is left out; without one it must be there.

        Returns:
            The value.

        Raises:
            UserError: It is missing, or of another type.
        """
        value = self._table.get(key, default)
        if value is ...:
            raise UserError(f"{self.where} lacks {key!r}: add it, {rule}.")
        good = isinstance(value, kinds) and (kinds is bool or not isinstance(value, bool))
        if value is not default and not good:
            raise self.wrong(key, value, rule)
        return value

    def text(self, key: str) -> str:
        """Takes a text."""
        found: str = self.take(key, str, "a text")
        return found

    def whole(self, key: str, least: int, default: Any = ..., *, most: int = 2**63 - 1) -> int:
        """Takes a whole number."""
        rule = f"a whole number of at least {least}"
        value: int = self.take(key, int, rule, default=default)
        if value is default:
            return value
        if value < least:
            raise self.wrong(key, value, rule)
        if value > most:
            raise self.wrong(key, value, f"a whole number of at most {most}")
        return value

    def positive(self, key: str) -> float:
        """Takes a positive number."""
        return float(self.number(key, "a positive number", least=sys.float_info.min))

    def number(
        self, key: str, rule: str, *, least: float = -sys.float_info.max, default: Any = ...
    ) -> Any:
        """Takes a number, finite and whole if it was."""
        value = self.take(key, (int, float), rule, default=default)
        if value is not default and not least <= value <= sys.float_info.max:
            raise self.wrong(key, value, rule)
        return value

    def table(self, key: str) -> dict[str, Any]:
        """Takes a table, empty where it is left out."""
        found: dict[str, Any] = self.take(key, dict, "a table", default={})
        return found

    def choice(self, key: str, known: Collection[str], default: Any = ...) -> Any:
        """Takes one of several words."""
        rule = f"one of {', '.join(known)}"
        value = self.take(key, str, rule, default=default)
        if value is not default and value not in known:
            raise self.wrong(key, value, rule)
        return value

    def wrong(self, key: str, value: object, rule: str) -> UserError:
        """Builds the error for a value out of range."""
        return UserError(f"{self.where}: {key} must be {rule}, got {value!r}.")


def _hint(key: str, known: Iterable[str]) -> str:
    """The known keys that a key may have been meant for; all of them where none is near."""
    near = difflib.get_close_matches(key, list(known), n=3, cutoff=NEAR)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"choose from {', '.join(known)}."
