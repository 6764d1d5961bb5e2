"""Pretrained models fine-tuned on sentences: GLUE with its own metrics, and movie reviews."""

from __future__ import annotations

from mkor_bench.data import sentences as data_sets
from mkor_bench.data.store import Store
from mkor_bench.metrics import accuracy, correlation, f1, matthews
from mkor_bench.tasks.fine_tuning import Problem, Size, fine_tuning_task
from mkor_bench.tasks.task import Task

ACCURACY = ("accuracy", accuracy)
MATTHEWS = ("Matthews correlation", matthews)
CORRELATION = ("correlation", correlation)
F1 = ("F1", f1)
SAME = "do two sentences say the same"
POSITIVE = "is it positive"

PROBLEMS = {
    "cola": Problem(
        data_sets.COLA, "is a sentence acceptable English", MATTHEWS, Size(16, 48, 600)
    ),
    "rte": Problem(
        data_sets.RTE, "does one sentence follow from the other", ACCURACY, Size(16, 96, 480)
    ),
    "sst2": Problem(data_sets.SST2, POSITIVE, ACCURACY, Size(16, 48, 150)),
    "stsb": Problem(
        data_sets.STSB, "how much two sentences mean the same", CORRELATION, Size(16, 64, 150)
    ),
    "qnli": Problem(
        data_sets.QNLI, "does a sentence answer a question", ACCURACY, Size(16, 96, 150)
    ),
    "mrpc": Problem(data_sets.MRPC, SAME, F1, Size(16, 96, 150)),
    "qqp": Problem(data_sets.QQP, SAME, F1, Size(16, 64, 300, test_rows=2_000)),
    "mnli": Problem(
        data_sets.MNLI,
        "does one sentence follow from the other, contradict it, or neither",
        ACCURACY,
        Size(16, 64, 300, test_rows=2_000),
    ),
    "polarity": Problem(data_sets.POLARITY, POSITIVE, ACCURACY, Size(16, 64, 100)),
    "reviews": Problem(data_sets.REVIEWS, POSITIVE, ACCURACY, Size(8, 256, 150, test_rows=400)),
}
"""By the last part of a task's name."""

FULL = Size(32, 128, 1_500)
"""Of the larger models; the steps are those that the paper gives MKOR (table 4)."""

LONG = Size(16, 512, 1_500)
"""The same for reviews."""

QUICK = Size(8, 16, 30, 1, 64)


def task(data: Store, quick: bool = False, *, model: str, problem: str) -> Task:
    """Makes a task.

    Args:
        data: Where the sentences and the model are: a folder, or "hub".
        quick: One layer of the network, for fewer steps.
        model: The pretrained model, by its name in the registry.
        problem: The data set, the same.

    Returns:
        The task.
    """
    asked = PROBLEMS[problem]
    full = asked.size if model == "minilm" else LONG if problem == "reviews" else FULL
    return fine_tuning_task(f"{model}-{problem}", asked, model, QUICK if quick else full, data)
