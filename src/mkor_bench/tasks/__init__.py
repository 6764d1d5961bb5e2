"""Training problems: one file a task, and the user's own.

A built-in task is a module with a function ``task(data, quick)`` that returns a
:class:`~mkor_bench.tasks.task.Task`, and one row below. A user's task is a function in
any Python file, named ``path/to/file.py:function`` on the command line.

This module imports nothing heavy, so that ``mkor --help`` is quick.
"""

from __future__ import annotations

TASKS: dict[str, str] = {
    "digits-autoencoder": "mkor_bench.tasks.digits_autoencoder",
    "digits-classifier": "mkor_bench.tasks.digits_classifier",
    "mnist-autoencoder": "mkor_bench.tasks.mnist_autoencoder",
    "mnist-convnet": "mkor_bench.tasks.mnist_convnet",
    "cifar100-convnet": "mkor_bench.tasks.cifar100_convnet",
    "cifar100-autoencoder": "mkor_bench.tasks.cifar100_autoencoder",
    "cifar100-resnet20": "mkor_bench.tasks.cifar100_resnet20",
    "shakespeare": "mkor_bench.tasks.shakespeare",
    "wikitext-masked": "mkor_bench.tasks.wikitext_masked",
    "minilm-rte": "mkor_bench.tasks.minilm_rte",
    "minilm-cola": "mkor_bench.tasks.minilm_cola",
    "minilm-polarity": "mkor_bench.tasks.minilm_polarity",
}
"""Built-in tasks: the name and the module that makes the task."""

GROUPS: dict[str, tuple[str, ...]] = {
    "digits": ("digits-autoencoder", "digits-classifier"),
}
"""Names for several tasks that are compared together."""
