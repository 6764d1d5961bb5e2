"""Plain texts, split into a part for training and one for testing.

Local layout: ``tinyshakespeare/input.txt.gz``, of which the last tenth is the test part;
``wikitext2/train.txt.gz`` and ``valid.txt.gz``. On the hub: ``karpathy/tiny_shakespeare`` and
``Salesforce/wikitext`` (wikitext-2-v1).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mkor_bench.data.store import BLANK, Store, from_hub, local_files, need_store, read_text


@dataclass(frozen=True)
class Text:
    """A text in two parts.

    Attributes:
        train: What may be trained on.
        test: What is only ever measured on.
    """

    train: str
    test: str


@cache
def load_shakespeare(store: Store) -> Text:
    """Loads Tiny Shakespeare, 1.1 million characters; the last tenth is the test part.

    Args:
        store: The data folder, or "hub".

    Returns:
        The text.

    Raises:
        UserError: It cannot be had there.
    """
    place = need_store(store, "the text Tiny Shakespeare")
    if isinstance(place, Path):
        whole = read_text(*local_files(place, "tinyshakespeare", "input.txt.gz"))
    else:
        parts = (
            from_hub("karpathy/tiny_shakespeare", None, split)["text"]
            for split in ("train", "validation", "test")
        )
        whole = "".join(text for part in parts for text in part)
    cut = len(whole) * 9 // 10
    return Text(whole[:cut], whole[cut:])


@cache
def load_wikitext2(store: Store) -> Text:
    """Loads WikiText-2.

    The folder's ``train.txt.gz`` may be any part of the corpus; the hub has the official ones.

    Args:
        store: The data folder, or "hub".

    Returns:
        The text; the test part is the official validation part.

    Raises:
        UserError: It cannot be had there.
    """
    place = need_store(store, "the text WikiText-2")
    if place == BLANK:
        return Text(*("word " * 100_000,) * 2)
    if isinstance(place, Path):
        return Text(
            *map(read_text, local_files(place, "wikitext2", "train.txt.gz", "valid.txt.gz"))
        )
    parts = (
        from_hub("Salesforce/wikitext", "wikitext-2-v1", split)["text"]
        for split in ("train", "validation")
    )
    return Text(*("".join(part) for part in parts))
