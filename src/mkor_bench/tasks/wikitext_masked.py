"""Masked words of WikiText-2, as in BERT's pre-training, at a size for a laptop.

A word is what stands between spaces. The 2,000 most frequent ones of the training part have a
number each, the others share one and are never masked. Of each passage 15 % of the known words
are predicted: 80 % of them are hidden, 10 % replaced by another word and 10 % left as they are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mkor_bench.data.store import Store
from mkor_bench.data.text import Text, load_wikitext2
from mkor_bench.models.transformer import LanguageModel
from mkor_bench.tasks.batches import need_rows, passages
from mkor_bench.tasks.masking import SHARE, disguised
from mkor_bench.tasks.task import Task

BATCH_SIZE = 16
MASK, UNKNOWN, SPECIAL = 0, 1, 2
"""The numbers of a hidden word and of a rare one; words begin at the third."""

DEFAULT_LRS = {"sgd": 0.1, "adamw": 0.01, "lamb": 0.03, "mkor": 0.1, "mkor-adamw": 0.01}

_TEST_SEED = 0


class Size(NamedTuple):
    """How large the task is.

    Attributes:
        words: That have a number of their own.
        width: Of the transformer.
        context: Words in a row of a batch.
        steps: Of a run.
        test_words: How much of the test part the metric looks at.
    """

    words: int
    width: int
    context: int
    steps: int
    test_words: int


FULL = Size(2_000, 128, 64, 600, 40_000)
QUICK = Size(100, 32, 16, 60, 1_000)


@dataclass(frozen=True)
class WikitextMasked:
    """The parts of the task.

    Attributes:
        train: The training part as numbers, [words].
        test: The test part.
        size: How large the task is.
    """

    train: Tensor
    test: Tensor
    size: Size

    def build(self, seed: int) -> nn.Module:
        """Makes the network; the run has seeded torch's generator."""
        del seed
        vocabulary = SPECIAL + self.size.words
        return LanguageModel(vocabulary, self.size.context, self.size.width, causal=False)

    def batches(self, seed: int) -> Iterator[tuple[Tensor, ...]]:
        """Endless batches of masked passages from anywhere in the training part."""
        generator = torch.Generator().manual_seed(seed)
        length = self.size.context
        while True:
            words = passages(self.train, length, BATCH_SIZE, generator)
            yield (*masked(words, self.size.words, generator), words)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Cross entropy of the chosen words in nats, averaged over them."""
        shown, chosen, words = batch
        return cross_entropy(model(shown, chosen), words[chosen])

    def evaluate(self, model: nn.Module) -> float:
        """Bits a chosen word on the test part; the choice is always the same."""
        generator = torch.Generator().manual_seed(_TEST_SEED)
        passages = self.test[: len(self.test) // self.size.context * self.size.context]
        total, count = 0.0, 0
        for words in passages.view(-1, self.size.context).split(64):
            batch = (*masked(words, self.size.words, generator), words)
            chosen = int(batch[1].sum())
            total += self.loss(model, batch).item() * chosen
            count += chosen
        return total / count / math.log(2)


def masked(words: Tensor, known: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Chooses the words to predict, and hides most of them.

    Args:
        words: Numbers of words, [rows, length].
        known: How many words have a number of their own.
        generator: Draws.

    Returns:
        The words to show and which were chosen, both [rows, length].
    """
    chosen = (torch.rand(words.shape, generator=generator) < SHARE) & (words >= SPECIAL)
    return disguised(words, chosen, MASK, (SPECIAL, SPECIAL + known), generator), chosen


def encode(text: Text, known: int) -> tuple[Tensor, Tensor]:
    """Numbers the words of a text by their frequency in its training part.

    Args:
        text: Its two parts.
        known: How many words get a number of their own.

    Returns:
        Both parts as numbers.
    """
    train, test = text.train.split(), text.test.split()
    counts = Counter(word for word in train if word != "<unk>")
    # By count, then by the alphabet: the order never depends on that of the text.
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[:known]
    numbers = {word: number for number, word in enumerate(frequent, SPECIAL)}
    one, other = (
        torch.tensor([numbers.get(word, UNKNOWN) for word in part]) for part in (train, test)
    )
    return one, other


def task(data: Store, quick: bool = False) -> Task:
    """Makes the task.

    Args:
        data: Where WikiText-2 is: a folder, or "hub".
        quick: A smaller network for fewer steps.

    Returns:
        The task.
    """
    size = QUICK if quick else FULL
    train, test = encode(load_wikitext2(data), size.words)
    for part, use in ((train, "train"), (test, "test")):
        need_rows(len(part), size.context, f"words to {use} on", "a passage")
    parts = WikitextMasked(train, test[: size.test_words], size)
    return Task(
        name="wikitext-masked",
        description="two-block transformer, masked words of WikiText-2",
        build=parts.build,
        batches=parts.batches,
        loss=parts.loss,
        evaluate=parts.evaluate,
        metric="test bits per masked word",
        higher_is_better=False,
        steps=size.steps,
        default_lrs=DEFAULT_LRS,
    )
