"""Pretrained models that learn to answer the questions of SQuAD v1.1, scored by its own rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mkor_bench.data.squad import Question, load_squad
from mkor_bench.data.store import Store
from mkor_bench.metrics import Answered, squad
from mkor_bench.models.bert import (
    CHECKPOINTS,
    Checkpoint,
    SpanReader,
    find_checkpoint,
    load_encoder,
    load_tokenizer,
)
from mkor_bench.tasks.batches import shuffled_batches
from mkor_bench.tasks.fine_tuning import DEFAULT_LRS, FULL_LRS
from mkor_bench.tasks.task import Task
from mkor_bench.tasks.windows import Window, batch_of, best_spans, windows

LONGEST_ANSWER = 30
"""Word pieces of an answer at most, as in BERT's own fine-tuning."""


class Size(NamedTuple):
    """How large the task is.

    Attributes:
        batch_size: Windows in a batch.
        max_length: Word pieces of a window at most.
        stride: Word pieces that neighbouring windows share.
        steps: Of a run.
        layers: Of the encoder; all, if None.
        train_rows: How many questions are trained on; all, if None.
        test_rows: How many questions the metric asks; all, if None.
    """

    batch_size: int
    max_length: int
    stride: int
    steps: int
    layers: int | None = None
    train_rows: int | None = None
    test_rows: int | None = None


SIZES = {
    "minilm": Size(8, 192, 64, 300, test_rows=400),
    "bert-base": Size(32, 384, 128, 1_500),
    "bert-large": Size(32, 384, 128, 1_500),
}
QUICK = Size(8, 32, 8, 30, 1, 64, 32)


@dataclass(frozen=True)
class Squad:
    """The parts of the task.

    Attributes:
        checkpoint: The pretrained model.
        path: Where its files are.
        size: How large the task is.
        train: Windows of questions to train on that have the answer.
        spans: The first and the last word piece of each one's answer, [windows, 2].
        questions: What the metric asks.
        test: Their windows.
    """

    checkpoint: Checkpoint
    path: str
    size: Size
    train: list[Window]
    spans: Tensor
    questions: list[Question]
    test: list[Window]

    def build(self, seed: int) -> nn.Module:
        """Loads the network; the run has seeded torch's generator, which makes the last layer."""
        del seed
        return SpanReader(load_encoder(self.checkpoint, self.path, self.size.layers))

    def batches(self, seed: int) -> Iterator[tuple[Tensor, ...]]:
        """Endless training batches of padded windows and the places of their answers."""
        rows = torch.arange(len(self.train))
        for (chosen,) in shuffled_batches((rows,), self.size.batch_size, seed):
            yield *batch_of([self.train[row] for row in chosen.tolist()]), self.spans[chosen]

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Cross entropy of the answer's begin and end, the mean of both, over the batch."""
        *inputs, spans = batch
        begin, end = model(*inputs)
        return (cross_entropy(begin, spans[:, 0]) + cross_entropy(end, spans[:, 1])) / 2

    def evaluate(self, model: nn.Module) -> float:
        """The F1 of the answers to the test questions."""
        return self.score(model).f1

    def score(self, model: nn.Module) -> Answered:
        """Both official scores on the test questions."""
        return squad(self.answers(model), {asked.name: asked.answers for asked in self.questions})

    def answers(self, model: nn.Module) -> dict[str, str]:
        """The text that answers each test question: the best span over all of its windows."""
        best: dict[str, float] = {}
        texts: dict[str, str] = {}
        order = sorted(self.test, key=lambda window: len(window.words))
        for begin in range(0, len(order), 32):
            chosen = order[begin : begin + 32]
            words, mask, segments = batch_of(chosen)
            logits = model(words, mask, segments)
            inside = _inside(chosen, words.shape[1])
            found = [part.tolist() for part in best_spans(logits, inside, LONGEST_ANSWER)]
            for window, score, first, last in zip(chosen, *found, strict=True):
                asked = self.questions[window.question]
                if score > best.get(asked.name, -torch.inf):
                    best[asked.name] = score
                    texts[asked.name] = asked.context[window.begins[first] : window.ends[last]]
        return texts


def _inside(chosen: list[Window], length: int) -> Tensor:
    inside = torch.zeros(len(chosen), length, dtype=torch.bool)
    for row, window in enumerate(chosen):
        inside[row, : len(window.begins)] = window.begins >= 0
    return inside


def task(data: Store, quick: bool = False, *, model: str) -> Task:
    """Makes the task.

    Args:
        data: Where SQuAD and the model are: a folder, or "hub".
        quick: One layer of the network, for fewer steps.
        model: The pretrained model, by its name in the registry.

    Returns:
        The task.
    """
    size, checkpoint = QUICK if quick else SIZES[model], CHECKPOINTS[model]
    train, test = load_squad(data)
    path = find_checkpoint(checkpoint, data)
    tokenizer = load_tokenizer(path)
    train, test = train[: size.train_rows], test[: size.test_rows]
    cut = [windows(part, tokenizer, size.max_length, size.stride) for part in (train, test)]
    # SQuAD v1.1 has an answer to every question, so a window without it teaches nothing.
    spans = [(window, window.span(train[window.question])) for window in cut[0]]
    answered = [(window, span) for window, span in spans if span is not None]
    parts = Squad(
        checkpoint,
        path,
        size,
        [window for window, _ in answered],
        torch.tensor([span for _, span in answered]),
        test,
        cut[1],
    )
    return Task(
        name=f"{model}-squad",
        description=f"{checkpoint.title} fine-tuned on SQuAD v1.1: where is the answer",
        build=parts.build,
        batches=parts.batches,
        loss=parts.loss,
        evaluate=parts.evaluate,
        metric="test F1",
        higher_is_better=True,
        steps=size.steps,
        default_lrs=DEFAULT_LRS if model == "minilm" else FULL_LRS,
    )
