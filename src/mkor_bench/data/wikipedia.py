"""The English Wikipedia, streamed from the hub: ``wikimedia/wikipedia`` (20231101.en)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from mkor_bench.data.store import from_hub, streamed, unfit

HUB_NAME = "wikimedia/wikipedia"
_PART = "20231101.en"
_TESTED = 100
"""One article in so many is for testing, by its number."""

_SHUFFLED_TOGETHER = 1_000
"""Articles of the stream of which one is drawn; the order of its files is shuffled as well."""


class Wikipedia:
    """Articles as they are needed.

    Raises:
        UserError: The hub cannot be reached.
    """

    def __init__(self) -> None:
        self._rows = from_hub(HUB_NAME, _PART, "train", streaming=True)

    def train(self, seed: int) -> Iterator[str]:
        """The articles for training again and again, in an order that the seed fixes.

        Args:
            seed: Fixes the order, which is another in each epoch.

        Yields:
            Their texts, none of them blank.

        Raises:
            UserError: The hub can no longer be reached, or no article has a text.
        """
        rows = self._rows.shuffle(seed=seed, buffer_size=_SHUFFLED_TOGETHER)
        for epoch in count():
            rows.set_epoch(epoch)
            empty = True
            for text in _texts(rows, tested=False):
                empty = False
                yield text
            if empty:
                raise unfit(repr(HUB_NAME), "no article has a text", "it must have articles")

    def test(self) -> Iterator[str]:
        """The articles for testing, once and always in the same order."""
        return _texts(self._rows, tested=True)


def _texts(rows: Any, *, tested: bool) -> Iterator[str]:
    for row in streamed(rows, HUB_NAME):
        if (int(row["id"]) % _TESTED == 0) is tested and row["text"].strip():
            yield row["text"]
