"""Labelled sentences and pairs of sentences.

Local layout: ``glue/TASK_train.tsv.gz`` and ``TASK_dev.tsv.gz``, ``sentence_polarity/train.tsv.gz``
and ``test.tsv.gz``: UTF-8, a header line, columns between tabs, no quoting, the label last. On the
hub: ``nyu-mll/glue`` and ``cornell-movie-review-data/rotten_tomatoes``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mkor_bench.data.store import Store, from_hub, local_files, need_store, read_text
from mkor_bench.errors import UserError


@dataclass(frozen=True)
class Sentences:
    """One part of a data set.

    Attributes:
        texts: One sentence a row, or two.
        labels: The class of each row.
    """

    texts: list[tuple[str, ...]]
    labels: list[int]


@dataclass(frozen=True)
class Source:
    """Where a data set is, in both places.

    Attributes:
        title: Its name in words.
        files: In the data folder: the folder, and the files for training and testing.
        hub: On the hub: the name, the part, and the splits for training and testing.
        columns: The columns with texts; "label" has the classes.
        hub_columns: The same on the hub, where they differ.
    """

    title: str
    files: tuple[str, str, str]
    hub: tuple[str, str | None, str, str]
    columns: tuple[str, ...]
    hub_columns: tuple[str, ...] | None = None


COLA = Source(
    "CoLA",
    ("glue", "cola_train.tsv.gz", "cola_dev.tsv.gz"),
    ("nyu-mll/glue", "cola", "train", "validation"),
    ("sentence",),
)
RTE = Source(
    "RTE",
    ("glue", "rte_train.tsv.gz", "rte_dev.tsv.gz"),
    ("nyu-mll/glue", "rte", "train", "validation"),
    ("sentence1", "sentence2"),
)
POLARITY = Source(
    "the sentence polarity data set",
    ("sentence_polarity", "train.tsv.gz", "test.tsv.gz"),
    ("cornell-movie-review-data/rotten_tomatoes", None, "train", "test"),
    ("sentence",),
    ("text",),
)


@cache
def load_sentences(source: Source, store: Store) -> tuple[Sentences, Sentences]:
    """Loads a data set.

    Args:
        source: Which.
        store: The data folder, or "hub".

    Returns:
        The part for training and the part for testing. Rows of the former that are in the latter
        too are left out.

    Raises:
        UserError: It cannot be had there.
    """
    place = need_store(store, source.title)
    if isinstance(place, Path):
        train, test = (_read(path, source.columns) for path in local_files(place, *source.files))
    else:
        name, part, *splits = source.hub
        train, test = (_from_hub(source, name, part, split) for split in splits)
    tested = set(test.texts)
    kept = [row for row in zip(train.texts, train.labels, strict=True) if row[0] not in tested]
    return Sentences([text for text, _ in kept], [label for _, label in kept]), test


def _read(path: Path, columns: tuple[str, ...]) -> Sentences:
    header, *lines = read_text(path).rstrip("\n").split("\n")
    names = header.split("\t")
    rows = [line.split("\t") for line in lines]
    try:
        places = [names.index(column) for column in columns]
        label = names.index("label")
        return Sentences(
            [tuple(row[place] for place in places) for row in rows],
            [int(row[label]) for row in rows],
        )
    except (ValueError, IndexError) as error:
        raise UserError(
            f"{str(path)!r} is not as documented ({error}): it must have a header line with "
            f"{', '.join(columns)} and label, and those columns in every line, between tabs."
        ) from error


def _from_hub(source: Source, name: str, part: str | None, split: str) -> Sentences:
    rows = from_hub(name, part, split)
    columns = source.hub_columns or source.columns
    texts = list(zip(*(rows[column] for column in columns), strict=True))
    return Sentences(texts, list(rows["label"]))
