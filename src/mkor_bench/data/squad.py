"""SQuAD v1.1: questions that a passage of a paragraph answers.

Local layout: ``squad/train.jsonl.gz`` and ``dev.jsonl.gz``, a JSON object a line with ``id``,
``context``, ``question``, ``answer`` and ``answer_start``, a character's place in the context. On
the hub: ``rajpurkar/squad``, whose questions for testing have several accepted answers each.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mkor_bench.data.store import BLANK, Store, from_hub, local_files, need_store, read_text, unfit


@dataclass(frozen=True)
class Question:
    """A question about a paragraph.

    Attributes:
        name: Identifies it.
        question: Its text.
        context: The paragraph.
        answers: Passages of the paragraph that answer it; the first is trained on.
        start: The first character of the first answer in the paragraph.
    """

    name: str
    question: str
    context: str
    answers: tuple[str, ...]
    start: int


@cache
def load_squad(store: Store) -> tuple[list[Question], list[Question]]:
    """Loads the data set.

    Args:
        store: The data folder, or "hub".

    Returns:
        The questions for training and those for testing, which are the official dev part.

    Raises:
        UserError: It cannot be had there, or an answer is not where its line says.
    """
    place = need_store(store, "SQuAD")
    if place == BLANK:
        blank = [Question(str(row), "word", "word " * 1000, ("word",), 0) for row in range(64)]
        return blank, blank
    if isinstance(place, Path):
        one, other = local_files(place, "squad", "train.jsonl.gz", "dev.jsonl.gz")
        return _read(one), _read(other)
    train, test = (from_hub("rajpurkar/squad", None, part) for part in ("train", "validation"))
    return [_from_row(row) for row in train], [_from_row(row) for row in test]


def _read(path: Path) -> list[Question]:
    # Not splitlines(), which cuts at characters that JSON allows in a text.
    lines = read_text(path).rstrip("\n").split("\n")
    return [_from_line(path, number, line) for number, line in enumerate(lines, 1)]


def _from_line(path: Path, number: int, line: str) -> Question:
    try:
        row = json.loads(line)
        read = Question(
            row["id"], row["question"], row["context"], (row["answer"],), int(row["answer_start"])
        )
        answer = read.answers[0]
        if not all(isinstance(text, str) for text in (read.name, read.question, answer)):
            raise TypeError("id, question and answer must be texts")
        if not answer or not read.context.startswith(answer, read.start) or read.start < 0:
            raise ValueError(f"{answer!r} does not begin at character {read.start} of its context")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"no {error}" if isinstance(error, KeyError) else str(error)
        rule = "each must be a JSON object with id, context, question, answer and answer_start"
        raise unfit(f"line {number} of {str(path)!r}", problem, rule) from error
    return read


def _from_row(row: Any) -> Question:
    answers = row["answers"]
    return Question(
        row["id"],
        row["question"],
        row["context"],
        tuple(answers["text"]),
        int(answers["answer_start"][0]),
    )
