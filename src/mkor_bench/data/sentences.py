"""Labelled sentences and pairs of sentences.

Local layout: ``glue/TASK_train.tsv.gz`` and ``TASK_dev.tsv.gz``; ``train.tsv.gz`` and
``test.tsv.gz`` in ``sentence_polarity`` and ``movie_reviews``: UTF-8, a header line, columns
between tabs, no quoting. On the hub: ``nyu-mll/glue``, ``stanfordnlp/imdb`` and
``cornell-movie-review-data/rotten_tomatoes``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mkor_bench.data.store import BLANK, Store, from_hub, local_files, need_store, read_text
from mkor_bench.errors import UserError


@dataclass(frozen=True)
class Sentences:
    """One part of a data set.

    Attributes:
        texts: One sentence a row, or two.
        labels: The class of each row, or a score.
    """

    texts: list[tuple[str, ...]]
    labels: list[int] | list[float]


@dataclass(frozen=True)
class Source:
    """Where a data set is, in both places.

    Attributes:
        title: Its name in words.
        files: In the data folder: the folder, and the files for training and testing.
        hub: On the hub: the name, the part, and the splits for training and testing.
        columns: The columns with texts.
        hub_columns: The same on the hub, where they differ.
        label: The column with a number for each row in the files: "label" for a class, else a
            score. On the hub it is "label".
    """

    title: str
    files: tuple[str, str, str]
    hub: tuple[str, str | None, str, str]
    columns: tuple[str, ...]
    hub_columns: tuple[str, ...] | None = None
    label: str = "label"


def _glue(title: str, name: str, *columns: str, **options: Any) -> Source:
    return Source(
        title,
        ("glue", f"{name}_train.tsv.gz", f"{name}_dev.tsv.gz"),
        ("nyu-mll/glue", name, "train", options.pop("test", "validation")),
        columns,
        **options,
    )


COLA = _glue("CoLA", "cola", "sentence")
RTE = _glue("RTE", "rte", "sentence1", "sentence2")
SST2 = _glue("SST-2", "sst2", "sentence")
STSB = _glue("STS-B", "stsb", "sentence1", "sentence2", label="score")
QNLI = _glue("QNLI", "qnli", "question", "sentence")
MRPC = _glue("MRPC", "mrpc", "sentence1", "sentence2")
QQP = _glue("QQP", "qqp", "question1", "question2")
MNLI = _glue("MNLI", "mnli", "premise", "hypothesis", test="validation_matched")
POLARITY = Source(
    "the sentence polarity data set",
    ("sentence_polarity", "train.tsv.gz", "test.tsv.gz"),
    ("cornell-movie-review-data/rotten_tomatoes", None, "train", "test"),
    ("sentence",),
    ("text",),
)
REVIEWS = Source(
    "a data set of movie reviews",
    ("movie_reviews", "train.tsv.gz", "test.tsv.gz"),
    ("stanfordnlp/imdb", None, "train", "test"),
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
    if place == BLANK:
        return (_blank(source),) * 2
    if isinstance(place, Path):
        train, test = (_read(path, source) for path in local_files(place, *source.files))
    else:
        name, part, *splits = source.hub
        train, test = (_from_hub(source, name, part, split) for split in splits)
    tested = set(test.texts)
    kept = [row for row in zip(train.texts, train.labels, strict=True) if row[0] not in tested]
    return Sentences([text for text, _ in kept], [label for _, label in kept]), test


def _blank(source: Source) -> Sentences:
    """Rows of a thousand words, which every length cuts."""
    return Sentences([("word " * 1000,) * len(source.columns)] * 64, [0, 1] * 32)


def _read(path: Path, source: Source) -> Sentences:
    header, *lines = read_text(path).rstrip("\n").split("\n")
    names = header.split("\t")
    rows = [line.split("\t") for line in lines]
    try:
        places = [names.index(column) for column in source.columns]
        label = names.index(source.label)
        number = int if source.label == "label" else float
        return Sentences(
            [tuple(row[place] for place in places) for row in rows],
            [number(row[label]) for row in rows],
        )
    except (ValueError, IndexError) as error:
        needed = f"{', '.join(source.columns)} and {source.label}"
        raise UserError(
            f"{str(path)!r} is not as documented ({error}): it must have a header line with "
            f"{needed}, and those columns in every line, between tabs."
        ) from error


def _from_hub(source: Source, name: str, part: str | None, split: str) -> Sentences:
    rows = from_hub(name, part, split)
    columns = source.hub_columns or source.columns
    texts = list(zip(*(rows[column] for column in columns), strict=True))
    return Sentences(texts, list(rows["label"]))
