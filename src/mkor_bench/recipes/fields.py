"""A table of a recipe, whose keys are taken and checked one by one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mkor_bench.errors import UserError, unknown_name


class Fields:
    """A table of the file whose keys are taken one by one; what is left is a mistake.

    Args:
        where: The file and the table, for messages.
        table: The table.
    """

    def __init__(self, where: str, table: Mapping[str, Any]) -> None:
        self.where = where
        self._left = dict(table)
        self._known: list[str] = []

    def take(
        self, key: str, kinds: type | tuple[type, ...], rule: str, *, default: Any = ...
    ) -> Any:
        """Takes a key's value.

        Args:
            key: The key.
            kinds: Its types.
            rule: What it must be, in words.
            default: Where it is left out; without one it must be there.

        Returns:
            The value.

        Raises:
            UserError: It is missing, or of another type.
        """
        self._known.append(key)
        value = self._left.pop(key, default)
        if value is ...:
            raise UserError(f"{self.where} lacks {key!r}: add it, {rule}.")
        if value is not default and (not isinstance(value, kinds) or isinstance(value, bool)):
            raise self.wrong(key, value, rule)
        return value

    def text(self, key: str) -> str:
        """Takes a text."""
        found: str = self.take(key, str, "a text")
        return found

    def whole(self, key: str, least: int, default: Any = ...) -> int:
        """Takes a whole number."""
        rule = f"a whole number of at least {least}"
        value: int = self.take(key, int, rule, default=default)
        if value < least:
            raise self.wrong(key, value, rule)
        return value

    def positive(self, key: str) -> float:
        """Takes a positive number."""
        value = float(self.take(key, (int, float), "a positive number"))
        if not (math.isfinite(value) and value > 0):
            raise self.wrong(key, value, "a positive number")
        return value

    def table(self, key: str) -> dict[str, Any]:
        """Takes a table, empty where it is left out."""
        found: dict[str, Any] = self.take(key, dict, "a table", default={})
        return found

    def choice(self, key: str, known: tuple[str, ...], default: Any = ...) -> Any:
        """Takes one of several words."""
        rule = f"one of {', '.join(known)}"
        value = self.take(key, str, rule, default=default)
        if value is not default and value not in known:
            raise self.wrong(key, value, rule)
        return value

    def end(self) -> None:
        """Refuses keys that nobody took."""
        for key in self._left:
            raise UserError(f"{self.where}: {unknown_name('key', key, self._known)}")

    def wrong(self, key: str, value: object, rule: str) -> UserError:
        """Builds the error for a value out of range."""
        return UserError(f"{self.where}: {key} must be {rule}, got {value!r}.")
