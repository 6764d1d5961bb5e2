"""A character language model of Shakespeare: two transformer blocks, 64 characters of context."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mkor_bench.data.store import Store
from mkor_bench.data.text import Text, load_shakespeare
from mkor_bench.models.transformer import LanguageModel
from mkor_bench.tasks.batches import need_rows, passages
from mkor_bench.tasks.task import Task

BATCH_SIZE = 16
DEFAULT_LRS = {"sgd": 0.1, "adamw": 0.02, "lamb": 0.03, "mkor": 0.1, "mkor-adamw": 0.02}


class Size(NamedTuple):
    """How large the task is.

    Attributes:
        width: Of the transformer.
        context: Characters in a row of a batch.
        steps: Of a run.
        test_characters: How much of the test part the metric looks at.
    """

    width: int
    context: int
    steps: int
    test_characters: int


FULL = Size(96, 64, 600, 100_000)
QUICK = Size(32, 32, 60, 5_000)


@dataclass(frozen=True)
class Shakespeare:
    """The parts of the task.

    Attributes:
        train: The training part as numbers, [characters].
        test: The test part.
        vocabulary: How many characters there are.
        size: How large the task is.
    """

    train: Tensor
    test: Tensor
    vocabulary: int
    size: Size

    def build(self, seed: int) -> nn.Module:
        """Makes the network; the run has seeded torch's generator."""
        del seed
        return LanguageModel(self.vocabulary, self.size.context, self.size.width, causal=True)

    def batches(self, seed: int) -> Iterator[tuple[Tensor, ...]]:
        """Endless batches of passages from anywhere in the training part, [rows, context + 1]."""
        generator = torch.Generator().manual_seed(seed)
        length = self.size.context + 1
        while True:
            yield (passages(self.train, length, BATCH_SIZE, generator),)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Cross entropy of the next character in nats, averaged over positions."""
        (passages,) = batch
        logits = model(passages[:, :-1])
        return cross_entropy(logits.flatten(0, 1), passages[:, 1:].flatten())

    def evaluate(self, model: nn.Module) -> float:
        """Bits per character on the test part, in passages that follow each other."""
        passages = self.test.unfold(0, self.size.context + 1, self.size.context)
        losses = [self.loss(model, (chunk,)) * len(chunk) for chunk in passages.split(64)]
        return float(sum(losses) / len(passages)) / math.log(2)


def encode(text: Text) -> tuple[Tensor, Tensor, int]:
    """Numbers the characters of a text by their order.

    Args:
        text: Its two parts.

    Returns:
        Both as numbers, and how many different characters they have.
    """
    numbers = {
        character: number for number, character in enumerate(sorted(set(text.train + text.test)))
    }
    train, test = (torch.tensor([numbers[c] for c in part]) for part in (text.train, text.test))
    return train, test, len(numbers)


def task(data: Store, quick: bool = False) -> Task:
    """Makes the task.

    Args:
        data: Where Tiny Shakespeare is: a folder, or "hub".
        quick: A smaller network for fewer steps.

    Returns:
        The task.
    """
    size = QUICK if quick else FULL
    train, test, vocabulary = encode(load_shakespeare(data))
    for part, use in ((train, "train"), (test, "test")):
        need_rows(len(part), size.context + 1, f"characters to {use} on", "a passage")
    parts = Shakespeare(train, test[: size.test_characters], vocabulary, size)
    return Task(
        name="shakespeare",
        description="two-block transformer, the next character of Shakespeare",
        build=parts.build,
        batches=parts.batches,
        loss=parts.loss,
        evaluate=parts.evaluate,
        metric="test bits per character",
        higher_is_better=False,
        steps=size.steps,
        default_lrs=DEFAULT_LRS,
    )
