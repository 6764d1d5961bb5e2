"""The official metrics of the tasks, all better when higher, 1 at best.

Those of GLUE take guesses and labels as tensors and are scikit-learn's and SciPy's. Those of
SQuAD v1.1 take texts and follow the rules of its evaluation script (Rajpurkar et al. 2016).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor

from mkor_bench.errors import UserError

Metric: TypeAlias = Callable[[Tensor, Tensor], float]
"""From guesses and labels, both [rows], to a number."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def accuracy(guesses: Tensor, labels: Tensor) -> float:
    """The share of guesses that are right."""
    return float((guesses == labels).double().mean())


def matthews(guesses: Tensor, labels: Tensor) -> float:
    """Matthews' correlation of two classes; 0 where all guesses or all labels are the same."""
    from sklearn.metrics import matthews_corrcoef

    if _constant(guesses) or _constant(labels):
        return 0.0
    return float(matthews_corrcoef(labels.cpu(), guesses.cpu()))


def f1(guesses: Tensor, labels: Tensor) -> float:
    """The harmonic mean of precision and recall of class 1; 0 where it is never guessed right."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels.cpu(), guesses.cpu(), zero_division=0.0))


def correlation(guesses: Tensor, labels: Tensor) -> float:
    """The mean of Pearson's and Spearman's correlations; 0 where all guesses are the same."""
    from scipy.stats import pearsonr, spearmanr

    if _constant(guesses) or _constant(labels):
        return 0.0
    pairs = guesses.double().cpu().numpy(), labels.double().cpu().numpy()
    return float(pearsonr(*pairs).statistic + spearmanr(*pairs).statistic) / 2


class Answered(NamedTuple):
    """How well questions are answered.

    Attributes:
        exact_match: The share of answers that are those of a reference.
        f1: The mean overlap of words with the best reference.
    """

    exact_match: float
    f1: float


def squad(guesses: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> Answered:
    """Scores answers by the rules of SQuAD v1.1.

    Args:
        guesses: The text that answers each question, by the question's name.
        references: The accepted answers of each question, at least one.

    Returns:
        Both scores from 0 to 1; the official script gives them in percent.

    Raises:
        UserError: There is no question, or one without a guess or without a reference.
    """
    if not references:
        raise UserError("SQuAD's metrics need at least one question; got none.")
    for name, answers in references.items():
        if name not in guesses or not answers:
            lacks = "an accepted answer" if name in guesses else "a guess"
            raise UserError(f"question {name!r} lacks {lacks}: each question needs one.")
    scores = [
        (exact_match(guesses[name], answers), token_f1(guesses[name], answers))
        for name, answers in references.items()
    ]
    exact, overlap = (sum(column) / len(scores) for column in zip(*scores, strict=True))
    return Answered(exact, overlap)


def exact_match(guess: str, references: Iterable[str]) -> float:
    """1 where the answer is that of a reference once both are normalised, else 0."""
    return float(any(normalise(guess) == normalise(reference) for reference in references))


def token_f1(guess: str, references: Iterable[str]) -> float:
    """The overlap of normalised words with the reference that it is highest with."""
    return max(_overlap(normalise(guess).split(), normalise(r).split()) for r in references)


def normalise(answer: str) -> str:
    """Lower case, without punctuation, without articles, single spaces; in this order."""
    plain = answer.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def _overlap(guessed: list[str], true: list[str]) -> float:
    common = (Counter(guessed) & Counter(true)).total()
    # 2PR / (P + R) with P = common / guessed and R = common / true.
    return 2 * common / (len(guessed) + len(true)) if common else 0.0


def _constant(values: Tensor) -> bool:
    return bool((values == values[0]).all())
