"""What the tasks that fine-tune MiniLM share: batches of padded sentences, loss, metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from mkor_bench.data.sentences import Sentences, Source, load_sentences
from mkor_bench.data.store import Store
from mkor_bench.models.minilm import load_minilm, load_tokenizer, minilm_path
from mkor_bench.tasks.batches import shuffled_batches
from mkor_bench.tasks.task import Task

DEFAULT_LRS = {"sgd": 0.03, "adamw": 1e-4, "lamb": 0.003, "mkor": 0.03, "mkor-adamw": 1e-4}
CLASSES = 2


class Size(NamedTuple):
    """How large a task is.

    Attributes:
        batch_size: Rows in a batch.
        max_length: Word pieces of a row at most.
        steps: Of a run.
        layers: Of the encoder; all, if None.
        test_rows: How many the metric looks at.
    """

    batch_size: int
    max_length: int
    steps: int
    layers: int | None
    test_rows: int


@dataclass(frozen=True)
class Rows:
    """Sentences as numbers.

    Attributes:
        words: The word pieces of each row.
        segments: Which sentence of the row each of them is in.
        labels: The class of each row, [rows].
    """

    words: list[Tensor]
    segments: list[Tensor]
    labels: Tensor

    def batch(self, chosen: list[int]) -> tuple[Tensor, ...]:
        """Returns words, mask, segments and labels of some rows, padded to the longest."""
        words = [self.words[row] for row in chosen]
        mask = pad_sequence([torch.ones_like(row) for row in words], batch_first=True)
        segments = pad_sequence([self.segments[row] for row in chosen], batch_first=True)
        # The padding word piece of BERT has the number 0, as has the padding here.
        return pad_sequence(words, batch_first=True), mask, segments, self.labels[chosen]


@dataclass(frozen=True)
class FineTuning:
    """The parts of a task.

    Attributes:
        train: What is trained on.
        test: What the metric looks at.
        path: Where the pretrained model is.
        size: How large the task is.
        metric: From guesses and labels, both [rows], to a number.
    """

    train: Rows
    test: Rows
    path: str
    size: Size
    metric: Callable[[Tensor, Tensor], float]

    def build(self, seed: int) -> nn.Module:
        """Loads the network; the run has seeded torch's generator, which makes the last layer."""
        del seed
        return load_minilm(self.path, CLASSES, self.size.layers)

    def batches(self, seed: int) -> Iterator[tuple[Tensor, ...]]:
        """Endless training batches of padded sentences."""
        rows = torch.arange(len(self.train.labels))
        for (chosen,) in shuffled_batches((rows,), self.size.batch_size, seed):
            yield self.train.batch(chosen.tolist())

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Cross entropy, averaged over the batch."""
        *inputs, labels = batch
        return cross_entropy(model(*inputs), labels)

    def evaluate(self, model: nn.Module) -> float:
        """The metric on the test rows, taken by length so that little is padded."""
        order = sorted(range(len(self.test.labels)), key=lambda row: len(self.test.words[row]))
        guesses, labels = [], []
        for begin in range(0, len(order), 64):
            *inputs, chosen = self.test.batch(order[begin : begin + 64])
            guesses.append(model(*inputs).argmax(dim=1))
            labels.append(chosen)
        return self.metric(torch.cat(guesses), torch.cat(labels))


def accuracy(guesses: Tensor, labels: Tensor) -> float:
    """The share of guesses that are right."""
    return float((guesses == labels).double().mean())


def matthews(guesses: Tensor, labels: Tensor) -> float:
    """Matthews' correlation of two classes, 0 and 1; 0 where all guesses are the same."""
    both = float((guesses * labels).sum())
    guessed, true, rows = float(guesses.sum()), float(labels.sum()), len(labels)
    spread = math.sqrt(guessed * (rows - guessed) * true * (rows - true))
    return (both * rows - guessed * true) / spread if spread else 0.0


def fine_tuning_task(
    name: str,
    description: str,
    source: Source,
    size: Size,
    metric: tuple[str, Callable[[Tensor, Tensor], float]],
    store: Store,
) -> Task:
    """Makes a task that fine-tunes MiniLM.

    Args:
        name: Of the task.
        description: In a sentence.
        source: The sentences.
        size: How large the task is.
        metric: Its name and its function.
        store: Where the sentences are.

    Returns:
        The task.
    """
    train, test = load_sentences(source, store)
    path = minilm_path(store)
    tokenizer = load_tokenizer(path)
    parts = FineTuning(
        encode(train, tokenizer, size.max_length),
        encode(head(test, size.test_rows), tokenizer, size.max_length),
        path,
        size,
        metric[1],
    )
    return Task(
        name=name,
        description=description,
        build=parts.build,
        batches=parts.batches,
        loss=parts.loss,
        evaluate=parts.evaluate,
        metric=metric[0],
        higher_is_better=True,
        steps=size.steps,
        default_lrs=DEFAULT_LRS,
    )


def head(sentences: Sentences, rows: int) -> Sentences:
    """Returns the first rows."""
    return Sentences(sentences.texts[:rows], sentences.labels[:rows])


def encode(sentences: Sentences, tokenizer: Any, max_length: int) -> Rows:
    """Cuts sentences into word pieces.

    Args:
        sentences: The rows.
        tokenizer: Of Hugging Face.
        max_length: Word pieces of a row at most; the longer sentence is cut first.

    Returns:
        The same rows as numbers.
    """
    columns = [list(column) for column in zip(*sentences.texts, strict=True)]
    made = tokenizer(
        *columns, truncation="longest_first", max_length=max_length, return_token_type_ids=True
    )
    return Rows(
        [torch.tensor(row) for row in made["input_ids"]],
        [torch.tensor(row) for row in made["token_type_ids"]],
        torch.tensor(sentences.labels),
    )
