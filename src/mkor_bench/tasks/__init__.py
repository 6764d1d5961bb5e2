"""Training problems: one file a kind, and the user's own.

A built-in task is a module with a function ``task(data, quick)`` that returns a
:class:`~mkor_bench.tasks.task.Task`, and one row below. A user's task is a function in
any Python file, named ``path/to/file.py:function`` on the command line.

This module imports nothing heavy, so that ``mkor --help`` is quick.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Entry(NamedTuple):
    """Where a built-in task is made.

    Attributes:
        module: The file of this folder that makes it.
        options: What its function ``task`` takes besides the data and the size.
    """

    module: str
    options: Mapping[str, str] = {}


_BERTS = ("minilm", "bert-base", "bert-large")
_GLUE = ("rte", "cola", "sst2", "stsb", "qnli", "mrpc", "qqp", "mnli")


def _pretrained(model: str, *problems: str) -> dict[str, Entry]:
    """The tasks that fine-tune a pretrained model on sentences."""
    return {
        f"{model}-{problem}": Entry("sentences", {"model": model, "problem": problem})
        for problem in problems
    }


TASKS: dict[str, Entry] = {
    "digits-autoencoder": Entry("digits_autoencoder"),
    "digits-classifier": Entry("digits_classifier"),
    "mnist-autoencoder": Entry("mnist_autoencoder"),
    "mnist-convnet": Entry("mnist_convnet"),
    "cifar100-convnet": Entry("cifar100_convnet"),
    "cifar100-autoencoder": Entry("cifar100_autoencoder"),
    "cifar100-resnet20": Entry("cifar100_resnet20"),
    "cifar100-alexnet": Entry("cifar100_alexnet"),
    "cifar10-resnet20": Entry("cifar10_resnet", {"model": "resnet20"}),
    "cifar10-resnet50": Entry("cifar10_resnet", {"model": "resnet50"}),
    "imagenet-resnet50": Entry("imagenet_resnet50"),
    "shakespeare": Entry("shakespeare"),
    "wikitext-masked": Entry("wikitext_masked"),
    **_pretrained("minilm", *_GLUE, "polarity", "reviews"),
    **_pretrained("bert-large", *_GLUE, "reviews"),
    **{f"{model}-squad": Entry("squad", {"model": model}) for model in _BERTS},
    **{f"{model}-masked": Entry("bert_masked", {"model": model}) for model in _BERTS},
}
"""Built-in tasks: the name and where the task is made."""

GROUPS: dict[str, tuple[str, ...]] = {
    "digits": ("digits-autoencoder", "digits-classifier"),
}
"""Names for several tasks that are compared together."""
