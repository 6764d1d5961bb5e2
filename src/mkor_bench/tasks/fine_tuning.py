"""What the tasks that fine-tune on sentences share: padded batches, loss, metric."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils.rnn import pad_sequence

from mkor_bench.data.sentences import Sentences, Source, load_sentences
from mkor_bench.data.store import Store
from mkor_bench.metrics import Metric
from mkor_bench.models.bert import (
    CHECKPOINTS,
    Checkpoint,
    SentenceClassifier,
    find_checkpoint,
    load_encoder,
    load_tokenizer,
)
from mkor_bench.tasks.batches import shuffled_batches
from mkor_bench.tasks.task import Task

DEFAULT_LRS = {"sgd": 0.03, "adamw": 1e-4, "lamb": 0.003, "mkor": 0.03, "mkor-adamw": 1e-4}
FULL_LRS = {**DEFAULT_LRS, "adamw": 3e-5, "mkor-adamw": 3e-5}
"""Of larger models: what is usual for them; not measured here."""


class Size(NamedTuple):
    """How large a task is.

    Attributes:
        batch_size: Rows in a batch.
        max_length: Word pieces of a row at most.
        steps: Of a run.
        layers: Of the encoder; all, if None.
        test_rows: How many the metric looks at; all, if None.
    """

    batch_size: int
    max_length: int
    steps: int
    layers: int | None = None
    test_rows: int | None = None


class Problem(NamedTuple):
    """A data set and what is to be told of its sentences.

    Attributes:
        source: The data set.
        asks: What is to be told, in words.
        metric: Its name and its function.
        size: For MiniLM.
    """

    source: Source
    asks: str
    metric: tuple[str, Metric]
    size: Size


@dataclass(frozen=True)
class Rows:
    """Sentences as numbers.

    Attributes:
        words: The word pieces of each row.
        segments: Which sentence of the row each of them is in.
        labels: The class of each row, or its score, [rows].
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
        problem: What is to be told.
        checkpoint: The pretrained model.
        path: Where its files are.
        size: How large the task is.
        train: What is trained on.
        test: What the metric looks at.
    """

    problem: Problem
    checkpoint: Checkpoint
    path: str
    size: Size
    train: Rows
    test: Rows

    def build(self, seed: int) -> nn.Module:
        """Loads the network; the run has seeded torch's generator, which makes the last layer."""
        del seed
        encoder = load_encoder(self.checkpoint, self.path, self.size.layers)
        return SentenceClassifier(encoder, self.problem.source.classes)

    def batches(self, seed: int) -> Iterator[tuple[Tensor, ...]]:
        """Endless training batches of padded sentences."""
        rows = torch.arange(len(self.train.labels))
        for (chosen,) in shuffled_batches((rows,), self.size.batch_size, seed):
            yield self.train.batch(chosen.tolist())

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Cross entropy of classes, or the squared error of scores, averaged over the batch."""
        *inputs, labels = batch
        outputs = model(*inputs)
        if self.problem.source.classes == 1:
            return mse_loss(outputs[:, 0], labels.float())
        return cross_entropy(outputs, labels)

    def evaluate(self, model: nn.Module) -> float:
        """The metric on the test rows, taken by length so that little is padded."""
        order = sorted(range(len(self.test.labels)), key=lambda row: len(self.test.words[row]))
        guesses, labels = [], []
        for begin in range(0, len(order), 64):
            *inputs, chosen = self.test.batch(order[begin : begin + 64])
            outputs = model(*inputs)
            guesses.append(outputs[:, 0] if outputs.shape[1] == 1 else outputs.argmax(dim=1))
            labels.append(chosen)
        return self.problem.metric[1](torch.cat(guesses), torch.cat(labels))


def fine_tuning_task(name: str, problem: Problem, model: str, size: Size, store: Store) -> Task:
    """Makes a task that fine-tunes a pretrained model on sentences.

    Args:
        name: Of the task.
        problem: The data set, and what is to be told.
        model: The pretrained model, by its name in the registry.
        size: How large the task is.
        store: Where the sentences are.

    Returns:
        The task.
    """
    checkpoint = CHECKPOINTS[model]
    train, test = load_sentences(problem.source, store)
    path = find_checkpoint(checkpoint, store)
    tokenizer = load_tokenizer(path)
    parts = FineTuning(
        problem,
        checkpoint,
        path,
        size,
        encode(train, tokenizer, size.max_length),
        encode(head(test, size.test_rows), tokenizer, size.max_length),
    )
    title = problem.source.title
    return Task(
        name=name,
        description=f"{checkpoint.title} fine-tuned on {title}: {problem.asks}",
        build=parts.build,
        batches=parts.batches,
        loss=parts.loss,
        evaluate=parts.evaluate,
        metric=f"test {problem.metric[0]}",
        higher_is_better=True,
        steps=size.steps,
        default_lrs=DEFAULT_LRS if model == "minilm" else FULL_LRS,
    )


def head(sentences: Sentences, rows: int | None) -> Sentences:
    """Returns the first rows; all, if None."""
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
