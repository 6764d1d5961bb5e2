"""Labelled sentences and pairs of sentences.

Local layout: ``glue/TASK_train.tsv.gz`` and ``TASK_dev.tsv.gz``; ``train.tsv.gz`` and
``test.tsv.gz`` in ``sentence_polarity`` and ``movie_reviews``: UTF-8, a header line, columns
between tabs, no quoting. On the hub: ``nyu-mll/glue``, ``stanfordnlp/imdb`` and
``cornell-movie-review-data/rotten_tomatoes``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mkor_bench.data.store import BLANK, Store, from_hub, local_files, need_store, read_text, unfit

_HIGHEST = 5.0
"""The best score; the worst is 0."""


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
        classes: How many classes the column "label" tells apart; 1 where there is a score from 0
            to 5 instead, in a column "score", which is "label" on the hub.
    """

    title: str
    files: tuple[str, str, str]
    hub: tuple[str, str | None, str, str]
    columns: tuple[str, ...]
    hub_columns: tuple[str, ...] | None = None
    classes: int = 2

    @property
    def label(self) -> str:
        """The column with the class or the score in the files."""
        return "score" if self.classes == 1 else "label"

    @property
    def rule(self) -> str:
        """What a label must be."""
        score = f"each score must be a number from 0 to {_HIGHEST:g}"
        whole = f"each label must be a whole number from 0 to {self.classes - 1}"
        return score if self.classes == 1 else whole

    def allows(self, label: float) -> bool:
        """Whether a label is one of the classes, or a score in its range."""
        return 0 <= label <= (_HIGHEST if self.classes == 1 else self.classes - 1)


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
STSB = _glue("STS-B", "stsb", "sentence1", "sentence2", classes=1)
QNLI = _glue("QNLI", "qnli", "question", "sentence")
MRPC = _glue("MRPC", "mrpc", "sentence1", "sentence2")
QQP = _glue("QQP", "qqp", "question1", "question2")
MNLI = _glue("MNLI", "mnli", "premise", "hypothesis", test="validation_matched", classes=3)
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
        UserError: It cannot be had there, or is not as documented.
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
    if not kept:
        problem = f"each of its {len(train.texts)} rows is in the test part too"
        raise unfit(f"the training part of {source.title}", problem, "it must have others")
    return Sentences([text for text, _ in kept], [label for _, label in kept]), test


def _blank(source: Source) -> Sentences:
    """As many rows as the largest batch has, longer than any length."""
    return Sentences([("word " * 520,) * len(source.columns)] * 32, [0, 1] * 16)


def _read(path: Path, source: Source) -> Sentences:
    header, *lines = read_text(path).rstrip("\n").split("\n")
    names, needed = header.split("\t"), [*source.columns, source.label]
    missing = [name for name in needed if name not in names]
    if missing or not lines:
        problem = f"no column {missing[0]!r}" if missing else "no line after the header"
        raise unfit(repr(str(path)), problem, _rule(source))
    places = [names.index(name) for name in needed]
    texts, labels = [], []
    for number, line in enumerate(lines, 2):
        columns = line.split("\t")
        if len(columns) != len(names):
            problem = f"{len(columns)} columns where the header has {len(names)}"
            raise unfit(f"line {number} of {str(path)!r}", problem, _rule(source))
        *row, label = (columns[place] for place in places)
        texts.append(tuple(row))
        labels.append(_number(label, source, f"line {number} of {str(path)!r}"))
    return Sentences(texts, labels)


def _rule(source: Source) -> str:
    needed = f"{', '.join(source.columns)} and {source.label}"
    return f"it must have a header line with {needed}, and its columns in every line, between tabs"


def _number(label: Any, source: Source, place: str) -> Any:
    try:
        number = float(label) if source.classes == 1 else int(label)
    except (ValueError, TypeError):
        number = math.nan
    if not source.allows(number):
        raise unfit(place, f"{source.label} {label!r}", source.rule)
    return number


def _from_hub(source: Source, name: str, part: str | None, split: str) -> Sentences:
    rows = from_hub(name, part, split)
    columns = source.hub_columns or source.columns
    texts = list(zip(*(rows[column] for column in columns), strict=True))
    place = f"the {split} part of {name!r}"
    return Sentences(texts, [_number(label, source, place) for label in rows["label"]])
