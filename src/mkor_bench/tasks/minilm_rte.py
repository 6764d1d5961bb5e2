"""A pretrained MiniLM fine-tuned on RTE: does one sentence follow from the other."""

from __future__ import annotations

from mkor_bench.data.sentences import RTE
from mkor_bench.data.store import Store
from mkor_bench.tasks.fine_tuning import Size, accuracy, fine_tuning_task
from mkor_bench.tasks.task import Task

FULL = Size(8, 64, 150, None, 2_000)
QUICK = Size(8, 16, 30, 1, 64)


def task(data: Store, quick: bool = False) -> Task:
    """Makes the task.

    Args:
        data: Where the sentences are: a folder, or "hub".
        quick: One layer of the network, for fewer steps.

    Returns:
        The task.
    """
    return fine_tuning_task(
        "minilm-rte",
        "MiniLM fine-tuned on RTE: does one sentence follow from the other",
        RTE,
        QUICK if quick else FULL,
        ("test accuracy", accuracy),
        data,
    )
