"""BERT's own pre-training on, from a pretrained model: words that are hidden in passages of a text.

The text is WikiText-2 of the data folder, or the English Wikipedia, which streams from the hub.
There is no prediction of the next sentence. A passage is cut anywhere, and may go over the end of
an article; all have the full length, so that nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from mkor_bench.data.store import HUB, Store
from mkor_bench.data.text import load_wikitext2
from mkor_bench.data.wikipedia import Wikipedia
from mkor_bench.models.bert import CHECKPOINTS, Checkpoint, find_checkpoint, load_tokenizer
from mkor_bench.models.masked import load_word_teller
from mkor_bench.tasks.batches import need_rows, passages
from mkor_bench.tasks.fine_tuning import DEFAULT_LRS, FULL_LRS
from mkor_bench.tasks.masking import disguised, drawn_places
from mkor_bench.tasks.task import Task

_ENDS = 2
"""Word pieces of a row that are none of the text: [CLS] and [SEP]."""

_TEST_SEED = 0


class Size(NamedTuple):
    """How large the task is.

    Attributes:
        batch_size: Rows in a batch.
        length: Word pieces of a row.
        steps: Of a run.
        test_rows: How many passages the metric looks at, at most.
        layers: Of the encoder; all, if None.
    """

    batch_size: int
    length: int
    steps: int
    test_rows: int
    layers: int | None = None


SIZES = {
    "minilm": Size(8, 128, 300, 256),
    "bert-base": Size(8, 512, 1_500, 256),
    "bert-large": Size(8, 512, 1_500, 256),
}
QUICK = Size(8, 16, 30, 16, 1)


class Passages(NamedTuple):
    """Where passages come from, each of the length of a row without its ends.

    Attributes:
        train: Makes an endless stream of them from a seed.
        test: Makes the stream of those for testing, always the same.
    """

    train: Callable[[int], Iterator[Tensor]]
    test: Callable[[], Iterator[Tensor]]


@dataclass(frozen=True)
class BertMasked:
    """The parts of the task.

    Attributes:
        checkpoint: The pretrained model.
        path: Where its files are.
        tokenizer: Its own.
        size: How large the task is.
        source: The passages.
    """

    checkpoint: Checkpoint
    path: str
    tokenizer: Any
    size: Size
    source: Passages

    def build(self, seed: int) -> nn.Module:
        """Loads the network; the run has seeded torch's generator, which makes what is new."""
        del seed
        return load_word_teller(self.checkpoint, self.path, self.size.layers)

    def batches(self, seed: int) -> Iterator[tuple[Tensor, ...]]:
        """Endless batches of rows to show, the places of chosen words, and these words."""
        # A seed of its own, lest the choice follow from the order of the passages.
        generator = torch.Generator().manual_seed(seed + 1)
        rows = self.source.train(seed)
        while True:
            yield self.masked(torch.stack(list(islice(rows, self.size.batch_size))), generator)

    def masked(self, text: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Chooses the words to predict, and hides most of them.

        Args:
            text: Numbers of word pieces, [rows, length - 2].
            generator: Draws.

        Returns:
            The rows to show with both ends, [rows, length]; the places of the chosen words in
            them and the words there, [rows, chosen].
        """
        known = self.tokenizer
        places = drawn_places(text != known.unk_token_id, generator)
        chosen = torch.zeros_like(text, dtype=torch.bool).scatter(1, places, True)
        shown = disguised(text, chosen, known.mask_token_id, (0, len(known)), generator)
        begun = pad(shown, (1, 0), value=known.cls_token_id)
        return pad(begun, (0, 1), value=known.sep_token_id), places + 1, text.gather(1, places)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Cross entropy of the chosen words in nats, averaged over them."""
        shown, places, words = batch
        return cross_entropy(model(shown, places).flatten(0, 1), words.flatten())

    def evaluate(self, model: nn.Module) -> float:
        """The share of chosen words that are told right; the choice is always the same."""
        generator = torch.Generator().manual_seed(_TEST_SEED)
        rows = islice(self.source.test(), self.size.test_rows)
        right = seen = 0
        while chunk := list(islice(rows, self.size.batch_size)):
            shown, places, words = self.masked(torch.stack(chunk), generator)
            right += int((model(shown, places).argmax(dim=2) == words).sum())
            seen += words.numel()
        return right / seen


def pieces(texts: Iterable[str], tokenizer: Any) -> list[int]:
    """Cuts texts into word pieces, line by line; blank lines have none."""
    lines = [line for text in texts for line in text.split("\n") if line.strip()]
    if not lines:
        return []
    rows = tokenizer(lines, add_special_tokens=False, verbose=False)["input_ids"]
    return [piece for row in rows for piece in row]


def packed(texts: Iterable[str], tokenizer: Any, length: int) -> Iterator[Tensor]:
    """Cuts a stream of texts into passages that follow each other, whatever ends within one.

    Args:
        texts: The texts.
        tokenizer: Of Hugging Face.
        length: Word pieces of a passage.

    Yields:
        Numbers of word pieces, [length]; what is left at the end is not among them.
    """
    left: list[int] = []
    for text in texts:
        left += pieces([text], tokenizer)
        whole = len(left) // length * length
        yield from torch.tensor(left[:whole], dtype=torch.long).view(-1, length)
        del left[:whole]


def of_a_text(train: Tensor, test: Tensor, length: int) -> Passages:
    """Passages from anywhere in a text in memory, and those of the test part one after another.

    Args:
        train: Numbers of word pieces.
        test: The same for testing.
        length: Of a passage.

    Raises:
        UserError: A part is shorter than one passage.
    """
    for part, use in ((train, "train"), (test, "test")):
        need_rows(len(part), length, f"word pieces to {use} on", "a passage")

    def drawn(seed: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield passages(train, length, 1, generator)[0]

    return Passages(drawn, lambda: iter(test.unfold(0, length, length)))


def find_passages(data: Store, tokenizer: Any, length: int) -> Passages:
    """Finds the text: Wikipedia for "hub", or WikiText-2.

    Args:
        data: The data folder, or "hub".
        tokenizer: Of Hugging Face.
        length: Word pieces of a passage.

    Returns:
        Its passages.

    Raises:
        UserError: The text cannot be had there, or is shorter than a passage.
    """
    if data == HUB:
        articles = Wikipedia()
        cut = partial(packed, tokenizer=tokenizer, length=length)
        return Passages(lambda seed: cut(articles.train(seed)), lambda: cut(articles.test()))
    text = load_wikitext2(data)
    # WikiText-2 marks rare words by a word of its own.
    parts = (part.replace("<unk>", tokenizer.unk_token) for part in (text.train, text.test))
    train, test = (torch.tensor(pieces([part], tokenizer), dtype=torch.long) for part in parts)
    return of_a_text(train, test, length)


def task(data: Store, quick: bool = False, *, model: str) -> Task:
    """Makes the task.

    Args:
        data: Where the text and the model are: a folder, or "hub".
        quick: One layer of the network and short rows, for fewer steps.
        model: The pretrained model, by its name in the registry.

    Returns:
        The task.
    """
    size, checkpoint = QUICK if quick else SIZES[model], CHECKPOINTS[model]
    path = find_checkpoint(checkpoint, data)
    tokenizer = load_tokenizer(path)
    source = find_passages(data, tokenizer, size.length - _ENDS)
    parts = BertMasked(checkpoint, path, tokenizer, size, source)
    return Task(
        name=f"{model}-masked",
        description=f"{checkpoint.title} trained on to tell masked words",
        build=parts.build,
        batches=parts.batches,
        loss=parts.loss,
        evaluate=parts.evaluate,
        metric="test accuracy of masked words",
        higher_is_better=True,
        steps=size.steps,
        default_lrs=DEFAULT_LRS if model == "minilm" else FULL_LRS,
    )
