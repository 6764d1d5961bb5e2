"""Paragraphs cut into windows that overlap, and the best answer over all windows of a question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from mkor_bench.data.squad import Question


@dataclass(frozen=True)
class Window:
    """A question with as much of its paragraph as the length allows.

    Attributes:
        question: Which question, by its place in the list.
        words: Numbers of word pieces, [length].
        segments: 0 in the question, 1 in the paragraph.
        begins: The first character of each word piece in the paragraph; -1 outside it.
        ends: The character after each word piece; -1 outside the paragraph.
    """

    question: int
    words: Tensor
    segments: Tensor
    begins: Tensor
    ends: Tensor

    def span(self, asked: Question) -> tuple[int, int] | None:
        """The first and the last word piece of a question's answer; None where it is cut."""
        start, stop = asked.start, asked.start + len(asked.answers[0])
        inside = (self.begins >= 0) & (self.begins < stop) & (self.ends > start)
        places = inside.nonzero()[:, 0].tolist()
        if not places or self.begins[places[0]] > start or self.ends[places[-1]] < stop:
            return None
        return places[0], places[-1]


def windows(
    questions: Sequence[Question], tokenizer: Any, max_length: int, stride: int
) -> list[Window]:
    """Cuts each paragraph so that every part of it is seen with the question.

    Args:
        questions: The questions.
        tokenizer: A fast tokenizer of Hugging Face.
        max_length: Word pieces of a window at most, with those of the question.
        stride: Word pieces of the paragraph that two windows share.

    Returns:
        At least one window for each question, in their order.
    """
    made = tokenizer(
        # What is left of the longest question must leave room for more than the stride.
        [_shortened(asked.question, tokenizer, max_length // 2) for asked in questions],
        [asked.context for asked in questions],
        truncation="only_second",
        max_length=max_length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_token_type_ids=True,
    )
    return [
        _window(made, row, question)
        for row, question in enumerate(made["overflow_to_sample_mapping"])
    ]


def batch_of(chosen: Sequence[Window]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns words, mask and segments of some windows, padded to the longest, [rows, length]."""
    # The padding word piece of BERT has the number 0, as has the padding here.
    words, mask, segments = (
        pad_sequence(rows, batch_first=True)
        for rows in (
            [window.words for window in chosen],
            [torch.ones_like(window.words) for window in chosen],
            [window.segments for window in chosen],
        )
    )
    return words, mask, segments


def best_spans(logits: Tensor, allowed: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Finds the best span of each window among all that are not too long.

    The usual lists of the n best begins and ends find the same, or a worse one.

    Args:
        logits: Of begins and ends, [2, rows, length].
        allowed: Where a span may begin and end, [rows, length].
        longest: Word pieces of a span at most.

    Returns:
        The sum of both logits, the first and the last word piece of each window's best, [rows].
    """
    begin, end = logits.float().masked_fill(~allowed, -torch.inf)
    # ends[row, i, k] is the logit of a span that begins at i and has k + 1 word pieces.
    ends = pad(end, (0, longest - 1), value=-torch.inf).unfold(1, longest, 1)
    best, place = (begin[:, :, None] + ends).flatten(1).max(dim=1)
    first = place // longest
    return best, first, first + place % longest


def _shortened(question: str, tokenizer: Any, pieces: int) -> str:
    offsets = tokenizer(
        question,
        add_special_tokens=False,
        truncation=True,
        max_length=pieces,
        return_offsets_mapping=True,
    )["offset_mapping"]
    return question[: offsets[-1][1]] if offsets else question


def _window(made: Any, row: int, question: int) -> Window:
    segments = torch.tensor(made["token_type_ids"][row])
    # The separator after the paragraph counts to it, and has no characters.
    offsets = torch.tensor(made["offset_mapping"][row])
    inside = (segments == 1) & (offsets[:, 1] > offsets[:, 0])
    begins, ends = offsets.masked_fill(~inside[:, None], -1).unbind(1)
    return Window(question, torch.tensor(made["input_ids"][row]), segments, begins, ends)
